"""How much each token counted for each target, by every method that was chosen.

A targets, T tokens
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...backends.backend import Array
from .gradients import Score, integrate, multiply_by_input
from .options import ResolvedOptions


@dataclass(frozen=True, eq=False)
class Saliency:
    """How much tokens counted: each (A, T), NaN where a token is not read; and the scores (A,)."""

    rows: dict[str, Array]
    scores: Array | None = None
    missing: Array | None = None


def measure_saliency(
    targets: int,
    tokens: int,
    choices: ResolvedOptions,
    prepare: Callable[[int], tuple[Score, Sequence[Array]]],
    occlude: Callable[[], Array],
) -> Saliency:
    """Return what each method says.

    Args:
        targets, tokens: A and T.
        choices: has the methods.
        prepare: returns a target's score and the embeddings (t, E), which are of the first t tokens.
        occlude: returns the falls (A, T).
    """
    rows: dict[str, Array] = {}
    scores = None
    missing = None

    def prepare_steps(number: int) -> tuple[Score, Sequence[Array]]:
        score, embeddings = prepare(number)

        def score_step(given: Sequence[Array]) -> tuple[Sequence[Array], Array]:
            choices.on_step()
            return score(given)

        return score_step, embeddings

    def make_rows() -> Array:
        return np.full((targets, tokens), np.nan, np.float32)

    if "gradient" in choices:
        rows["gradient_norm"] = make_rows()
        rows["gradient_x_input"] = make_rows()
        scores = np.zeros(targets, np.float32)
        for number in range(targets):
            gradients = multiply_by_input(*prepare_steps(number))
            count = len(gradients.shares)
            rows["gradient_norm"][number, :count] = gradients.shares
            rows["gradient_x_input"][number, :count] = gradients.contributions
            scores[number] = gradients.score
    if "integrated_gradients" in choices:
        rows["integrated_gradients"] = make_rows()
        missing = np.zeros(targets, np.float32)
        for number in range(targets):
            integral = integrate(*prepare_steps(number))
            rows["integrated_gradients"][number, : len(integral.contributions)] = integral.contributions
            missing[number] = integral.error
    if "occlusion" in choices:
        rows["occlusion"] = occlude()
    return Saliency(rows, scores, missing)
