"""Rounds weights to the nearest value, or with GPTQ, which keeps their products close instead.

M rows of activations x, K columns of them, N results, b columns in a block
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..number_formats import Codes, NumberFormat
from .quantized_weight import QuantizedWeight, cut_rows

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[np.float32]

PIECE_NUMBERS = 2**18  # of a weight that are rounded at a time: as many as stay in the processor's cache
STRIP = 512  # columns of x^T x that are computed at a time
# A row's error reaches those of its group first, then those of its block, then all others: products of few
# rows are slow, and many rows do not fit the processor's cache.
BLOCK = 256
GROUP = 16


def round_weight(
    weight: Array, scale: Array, format: NumberFormat, x: Array | None = None
) -> QuantizedWeight:
    """Return a weight (N, K) with these scales (N, K / b), rounded to the nearest.

    GPTQ keeps its products with `x` (M, K) close, too: rows like those that it will multiply.
    """
    if x is not None:
        columns = round_with_gptq(np.ascontiguousarray(weight.T, np.float32), scale.T, format, x)
        return QuantizedWeight(np.ascontiguousarray(columns.T), scale, format)
    codes = np.empty(weight.shape, format.dtype)
    for rows in cut_rows(weight.shape, PIECE_NUMBERS):
        blocks = np.ascontiguousarray(weight[rows], np.float32).reshape(*scale[rows].shape, -1)
        codes[rows] = format.round_pairs((blocks / scale[rows][..., None]).reshape(codes[rows].shape))
    return QuantizedWeight(codes, scale, format)


def factorize(x: Tensor, damping: float) -> Tensor:
    """Return F (K, K), lower triangular with ones on the diagonal, such that F^T e is the loss by errors e.

    x^T x, with `damping`, is F D F^T for a diagonal D: errors e of a weight's column lose the sum of
    D (F^T e)^2 in the products with x. F^T e of row j depends on the errors of the rows from j on alone.
    """
    import torch

    K = x.shape[1]
    power = torch.einsum("mk,mk->k", x, x)
    root = (power + damping * power.mean() + 1e-12).sqrt()
    even = x / root  # whose products have a diagonal of ones, which keeps the factors sound in float32
    hessian = torch.zeros(K, K)
    for end in range(STRIP, K + STRIP, STRIP):  # the upper half is not read
        hessian[end - STRIP : end, :end] = even[:, end - STRIP : end].T @ even[:, :end]
    hessian.fill_diagonal_(1)
    lower: Tensor
    lower, failed = torch.linalg.cholesky_ex(hessian)
    if failed:
        lower = torch.linalg.cholesky(hessian.double()).float()
    lower *= root[:, None]
    lower /= lower.diagonal().clone()
    return lower


def round_with_gptq(weight: Array, scale: Array, format: NumberFormat, x: Array) -> Codes:
    """Return the codes of `weight` (K, N) whose products with rows like x (M, K), float32, stay closest.

    Each row of `scale` (G, N), float32, is that of K / G rows. Rows are rounded one after another, those that
    meet the smallest activations last; each is shifted first by what makes up for the errors so far. Frantar
    et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022; there
    the errors move on through the inverse of x^T x, which takes more factorizing and rounds the same.
    """
    import torch

    K, N = weight.shape
    rows = torch.from_numpy(x)
    ordered = torch.einsum("mk,mk->k", rows, rows).argsort(stable=True)
    factor = factorize(rows[:, ordered], format.damping)
    order = ordered.numpy()
    weight = weight[order]
    scale = scale[order // (K // len(scale))]
    errors = np.empty((K, N), np.float32)
    rounded = np.zeros((K + K % 2, N), format.dtype)  # a row leaves room to all that are not rounded yet
    for end in range(K, 0, -BLOCK):
        begin = max(0, end - BLOCK)
        shifts = factor[end:, begin:end].T @ torch.from_numpy(errors[end:])  # of a block's rows
        for last in range(end, begin, -GROUP):
            first = max(begin, last - GROUP)
            group = shifts[first - begin : last - begin]
            group.addmm_(factor[last:end, first:last].T, torch.from_numpy(errors[last:end]))
            for row in range(last - 1, first - 1, -1):
                later = slice(row + 1, last)
                shift = np.einsum("k,kn->n", factor[later, row].numpy(), errors[later])
                shift += group[row - first].numpy()
                q = format.round_beside((weight[row] + shift) / scale[row], rounded[order[row] ^ 1])
                errors[row] = weight[row] - q.astype(np.float32) * scale[row]
                rounded[order[row]] = q
    return rounded[:K]
