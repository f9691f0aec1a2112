"""The best tokens to continue any of several rows with, found without sorting a vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .processors import Float32

FLOAT32_LEAST = np.finfo(np.float32).min
BLOCKS_OF = 256  # tokens: the best candidates are looked for in the few blocks that have them


class BeamCandidate(NamedTuple):
    """A token that may follow what a row has, and the sum of log-probabilities it would have."""

    score: np.float32
    row: int
    token: int
    logprob: float = 0.0  # the token's own under the model, where it is known


def find_candidates(
    scores: Float32, terms: Float32, ranks: npt.NDArray[np.int64], count: int
) -> list[BeamCandidate]:
    """Return the `count` best tokens of all rows together, best first, without -inf.

    Equal ones come by the row's rank, by which transformers counts rows, then by token; which of them
    transformers takes is up to torch.topk. Scores are (rows, whole blocks), before the terms (rows, 3) are
    applied: the highest logit and the logarithm that normalize a row's scores, and the row's sum so far.
    """
    # A block is a column: tokens `width` apart. numpy finds maxima across rows faster than along them.
    blocks = scores.reshape(len(scores), BLOCKS_OF, -1)
    width = blocks.shape[-1]
    peaks = add_terms(blocks.max(axis=1), terms[:, None])
    # The terms keep the order within a row, so the peaks are sums that exist: at least `count`
    # tokens reach the count-th highest peak, and all that do are in blocks whose peak does.
    border = np.float32(-np.inf)
    if count < peaks.size:
        border = np.partition(peaks, peaks.size - count, axis=None)[peaks.size - count]
    rows, columns = np.nonzero((peaks >= border) & (peaks > -np.inf))
    totals = add_terms(blocks[rows, :, columns], terms[rows, None])  # (blocks that count, BLOCKS_OF)
    which, lines = np.nonzero((totals >= border) & (totals > -np.inf))
    sums = totals[which, lines]
    rows = rows[which]
    tokens = lines * width + columns[which]
    order = np.lexsort((tokens, ranks[rows], -sums))[:count]
    return [BeamCandidate(sums[i], int(rows[i]), int(tokens[i])) for i in order]


def add_terms(scores: Float32, terms: Float32) -> Float32:
    """Return the rows' sums with these scores added: torch's float32 operations in torch's order."""
    total: Float32 = scores - terms[..., 0]
    total -= terms[..., 1]
    total += terms[..., 2]
    return total


def compute_log_sum(row: Float32, highest: np.float32, room: Float32) -> np.float32:
    """Return the log of a softmax's divisor, computed in `room`: one row at a time fits the CPU's cache."""
    np.subtract(row, highest, out=room)
    np.exp(room, out=room)
    return np.log(room.sum())  # type: ignore[no-any-return]
