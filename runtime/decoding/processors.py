"""Logits processors: those of transformers, with its arithmetic.

Each function changes the scores it is given. B rows, T tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import InputError

Float32: TypeAlias = npt.NDArray[np.float32]
GROUPS = 256  # of tokens, which a vocabulary is split into to find the likeliest


class LogitsProcessor(Protocol):
    """A function that changes the logits of each new token before it is chosen.

    Runs behind logit_bias, the penalties and no_repeat_ngram_size, and before temperature, top_k,
    top_p and min_p, as a custom processor of transformers does. Called once for each new token, in order.

    Args:
        token_ids: the prompt and the answer so far.
        logits: (V,) float32, which may be changed in place.

    Returns:
        (V,) floats; -inf forbids a token.

    Example:
        >>> def only_digits(token_ids, logits):
        ...     return np.where(is_digit, logits, -np.inf)
        >>> model.generate("The year ", logits_processor=only_digits)
    """

    def __call__(self, token_ids: Sequence[int], logits: Float32, /) -> npt.NDArray[np.floating[Any]]: ...


def penalize_repeats(row: Float32, history: Sequence[int], penalty: np.float32) -> None:
    """Make tokens of the history less likely, where the penalty is above 1. Other ids are ignored."""
    ids = np.asarray(history, dtype=np.int64)
    ids = ids[(ids >= 0) & (ids < len(row))]
    seen = row[ids]
    row[ids] = np.where(seen < 0, seen * penalty, seen / penalty)


def penalize_counts(
    row: Float32, answer: Sequence[int], frequency_penalty: np.float32, presence_penalty: np.float32
) -> None:
    """Make tokens of the answer less likely, as OpenAI does: by how often each came, and because it came.

    From each logit count * frequency_penalty is taken, and presence_penalty where the count is over 0.
    """
    ids, counts = np.unique(np.asarray(answer, dtype=np.int64), return_counts=True)
    known = (ids >= 0) & (ids < len(row))
    row[ids[known]] -= counts[known].astype(np.float32) * frequency_penalty + presence_penalty


def forbid_repeats(scores: Float32, histories: Sequence[Sequence[int]], size: int) -> None:
    """Set to -inf each token that would complete a run of `size` tokens that the row has already.

    Scores are (B, V), histories B rows of T token ids, of which those without a score are ignored.
    """
    T = len(histories[0])
    if size > T:
        return
    ids = np.array(histories, dtype=np.int64)
    starts = T - size + 1
    repeats = (ids[:, size - 1 :] >= 0) & (ids[:, size - 1 :] < scores.shape[1])  # (B, starts)
    for place in range(size - 1):
        repeats &= ids[:, place : place + starts] == ids[:, starts + place, None]
    rows, at = np.nonzero(repeats)
    scores[rows, ids[rows, at + size - 1]] = -np.inf


def run_processor(processor: LogitsProcessor, history: Sequence[int], row: Float32) -> None:
    """Replace a row by the result of a caller's processor; refuse one that is no (V,) floats."""
    result: Any = np.asarray(processor(tuple(history[:]), row))
    if result.shape != row.shape or not np.issubdtype(result.dtype, np.floating):
        raise InputError(
            f"logits_processor returned an array of {result.dtype} {result.shape}; it must return float32"
            f" logits of shape {row.shape}, like those it was given"
        )
    with np.errstate(over="ignore"):  # looked at by the caller
        row[:] = result


def keep_top_k(scores: Float32, top_k: int) -> None:
    """Set to -inf what lies below the k highest of each row; of equal ones at the border all stay."""
    if top_k < scores.shape[-1]:
        for row in scores:
            row[row < find_highest(row, top_k)] = -np.inf


def find_highest(row: Float32, count: int) -> np.float32:
    """Return the count-th highest of a row of scores (V,), of which none is NaN.

    At least `count` scores reach the count-th highest peak of the groups, so only those that do are put in
    order, which takes a tenth of the time.
    """
    width = len(row) // GROUPS
    if count <= GROUPS and width > 1:
        peaks = row[: GROUPS * width].reshape(width, GROUPS).max(axis=0)
        row = row[row >= np.partition(peaks, GROUPS - count)[GROUPS - count]]
    highest: np.float32 = np.partition(row, len(row) - count)[len(row) - count]
    return highest


def keep_top_p(row: Float32, top_p: float) -> None:
    """Set to -inf what lies below the nucleus: the smallest, up to 1 - top_p together."""
    candidates = np.flatnonzero(row > -np.inf)
    ascending = np.sort(row[candidates])  # values alone: ten times faster than argsort
    weights = np.exp(ascending - ascending[-1])
    # torch adds in float64 and rounds each sum to float32; so does this.
    cumulative = np.cumsum(weights / weights.sum(), dtype=np.float64).astype(np.float32)
    removed = int(np.searchsorted(cumulative, np.float32(1 - top_p), side="right"))
    removed = min(removed, len(ascending) - 1)  # the likeliest always stays
    border = ascending[removed]
    kept = len(ascending) - removed
    ties = candidates[row[candidates] == border]
    above = int(np.count_nonzero(row > border))
    row[row < border] = -np.inf
    row[ties[kept - above :]] = -np.inf


def keep_min_p(scores: Float32, min_p: float) -> None:
    """Set to -inf what has less than this share of its row's highest probability."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probabilities = weights / weights.sum(axis=-1, keepdims=True)
    border = np.float32(min_p) * probabilities.max(axis=-1, keepdims=True)
    scores[probabilities < border] = -np.inf
