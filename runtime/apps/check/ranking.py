"""Measures whether a graph's vectors find the texts that PyTorch's find.

N texts, E width of a vector, T tokens
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...backends.backend import Array
from ...encode.results import MultiVector
from ...encode.similarity import compare_dense, compare_multi, find_best
from .metrics import RankingMetrics

BEST = 10  # texts of a query, of which at most a quarter of all
SHARE = 4
TIE = 1e-5  # scores that are as close are equal: sums in another order differ by as much


def measure_ranking(got: Sequence[Array], want: Sequence[Array], similarity: str) -> RankingMetrics:
    """Measure how many of the best texts differ where each text is a query for all the others.

    Args:
        got: of each text a vector (1, E), or the vectors of its tokens (T, E).
        want: the reference's.
        similarity: how two texts are compared.
    """
    count = max(1, min(BEST, (len(want) - 1) // SHARE))
    rows = len(want) * count
    if not all(bool(np.isfinite(array).all()) for array in (*got, *want)):
        return RankingMetrics(1.0, math.nan, False, rows)
    ours, its = (score_texts(side, similarity) for side in (got, want))
    last = np.take_along_axis(its, find_best(its, count)[:, -1:], axis=1)
    found = np.take_along_axis(its, find_best(ours, count), axis=1)
    ties = TIE * np.abs(last)  # of texts that the reference finds as similar, any may be among the best
    return RankingMetrics(float((found < last - ties).mean()), measure_tau(ours, its), True, rows)


def score_texts(texts: Sequence[Array], similarity: str) -> Array:
    """Return the similarity (N, N) of texts; that of a text with itself is below all others."""
    if similarity in ("maxsim", "meanmaxsim"):
        many = [MultiVector(vectors, ()) for vectors in texts]
        scores = compare_multi(many, many, similarity)
    else:
        joined = np.concatenate(texts)
        scores = compare_dense(joined, joined, similarity)
    np.fill_diagonal(scores, -np.inf)
    return scores


def measure_tau(ours: Array, its: Array) -> float:
    """Return the mean of Kendall's tau over queries: pairs in the same order less the others, as a share."""
    taus = []
    for number, (one, other) in enumerate(zip(ours, its, strict=True)):
        own, wanted = (np.delete(row, number) for row in (one, other))
        signs = np.sign(own[:, None] - own) * np.sign(wanted[:, None] - wanted)
        taus.append(float(signs.sum()) / max(1, len(own) * (len(own) - 1)))
    return float(np.mean(taus))
