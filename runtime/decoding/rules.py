"""Rules of a checkpoint about sequences of tokens and about the end: transformers' processors.

Each function changes the scores it is given. R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..bundle.defaults import SequenceBias
from .checks import FLOAT32_MAX
from .processors import Float32


def add_sequence_bias(
    scores: Float32, histories: Sequence[Sequence[int]], biases: Sequence[SequenceBias]
) -> None:
    """Add to the scores (R, V) of tokens that would complete a sequence what each of these adds."""
    for row, history in zip(scores, histories, strict=True):
        sums: dict[int, np.float32] = {}
        for bias in biases:
            if is_begun(bias.tokens, history):
                last = bias.tokens[-1]
                sums[last] = sums.get(last, np.float32(0)) + np.float32(bias.added)
        for token, added in sums.items():
            row[token] += added


def forbid_words(
    scores: Float32, histories: Sequence[Sequence[int]], words: Sequence[tuple[int, ...]]
) -> None:
    """Set to -inf each token of the scores (R, V) that would complete one of these words."""
    for row, history in zip(scores, histories, strict=True):
        for word in words:
            if is_begun(word, history):
                row[word[-1]] = -np.inf


def is_begun(sequence: tuple[int, ...], history: Sequence[int]) -> bool:
    """Return whether all tokens of a sequence but the last are the last of a history."""
    before = len(sequence) - 1
    return before == 0 or (before <= len(history) and tuple(history[-before:]) == sequence[:-1])


def favour_end(scores: Float32, eos: Sequence[int], factor: float, steps: int) -> None:
    """Make end tokens of the scores (R, V) likelier by a factor to the power of some steps."""
    columns = list(eos)
    ends = scores[:, columns]
    with np.errstate(over="ignore"):  # grows without an end, and the end is certain long before
        growth = np.minimum(np.power(np.float64(factor), steps) - 1, FLOAT32_MAX)
        added = np.where(np.isfinite(ends), np.abs(ends) * np.float32(growth), np.float32(0))
        scores[:, columns] = np.minimum(ends + added, np.float32(FLOAT32_MAX))
