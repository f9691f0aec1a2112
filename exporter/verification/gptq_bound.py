"""How far GPTQ may move the numbers of a weight.

It moves each number of a row by what makes up for the errors of those before it, so none has a bound of its
own. Their products have. With H = x^T x, damped, and H = F D F^T, as `passes.gptq` factorizes it, the errors
e of a weight's row lose e^T H e = sum D_k (F^T e)_k^2 in the products with x, and (F^T e)_k is just what
rounding number k left: half a step at most. D_k is at most H_kk. So the products lose at most

    sum H_kk (step_k / 2)^2

which is three times what rounding to the nearest loses. A number beyond the range of its integers is off by
what is beyond as well. That is for the texts that GPTQ was fitted to; on others a row may lose more. In the
int4 of gpt2-demo and llama-demo, rows lose up to 0.21 of the bound on their own texts, and up to 1.03 on
others, program code and random letters, where the middle row of the weight loses at least a twelfth of that.

N rows of a weight, K columns, M rows x of activations
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...runtime.backends.backend import Array
from ..passes.gptq import DAMPING

LIMIT = 4.0  # times the bound: a whole step each instead of half of one
# Beyond the bound itself, a row may lose so many times what the middle row of its weight loses.
OUTSTANDING = 20.0

# Errors, steps, and how many steps are beyond the range of the integers, each (n, K).
Piece = tuple[Array, Array, Array]


def measure_losses(pieces: Iterable[Piece], x: Array) -> Array:
    """Return what each row of a weight (N,) loses in products with x (M, K), as a share of its bound."""
    power = np.einsum("mk,mk->k", x, x)
    power += DAMPING * power.mean() + np.finfo(np.float32).tiny
    shares = []
    for errors, steps, beyond in pieces:
        lost = np.square(errors @ x.T).sum(axis=1)
        bound = np.square(steps * (0.5 + beyond)) @ power
        shares.append(lost / np.maximum(bound, np.finfo(np.float32).tiny))  # a row of zeros loses nothing
    return np.concatenate(shares)


def describe_excess(shares: Array) -> str:
    """Return in words which rows lose more than GPTQ can; "" if none does."""
    middle = float(np.median(shares))
    many = shares > min(LIMIT, max(1.0, OUTSTANDING * middle))
    if not many.any():
        return ""
    return (
        f"loses up to {shares.max():.3g} times in products with real text what GPTQ can lose, where its"
        f" middle row loses {middle:.2g}: too much in {int(many.sum())} of {len(shares)} rows, first in"
        f" row {int(np.argmax(many))}"
    )
