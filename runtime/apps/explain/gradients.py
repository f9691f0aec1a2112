"""How much each token counted, by the gradient of a score.

T tokens, E width of an embedding, B points at a time
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ...backends.backend import Array

POINTS = 8  # of Gauss and Legendre's rule, in each interval
MAX_TOKENS = 1024  # of all points whose gradients are computed at a time, unless a single one has more
MAX_INTERVALS = 96
TOLERANCE = 0.005  # of the sum that integrated gradients must have
MIN_CHANGE = 1e-3  # a smaller difference of scores is not resolved any finer

# Embeddings (B, T, E), in one array or two, to their gradients and the scores (B,).
Score: TypeAlias = Callable[[Sequence[Array]], tuple[Sequence[Array], Array]]


@dataclass(frozen=True)
class InputGradients:
    """Gradient x input of one target.

    Attributes:
        contributions: (T,) the product's sum over each embedding, with its sign.
        shares: (T,) the product's L2 norm, as shares that sum to 1; zeros where the gradient is zero.
        score: what was differentiated.
    """

    contributions: Array
    shares: Array
    score: float


def multiply_by_input(score: Score, embeddings: Sequence[Array]) -> InputGradients:
    """Return gradient x input of embeddings (T, E), which may be in two arrays."""
    gradients, scores = score([each[None] for each in embeddings])
    products = np.concatenate([g[0] * x for g, x in zip(gradients, embeddings, strict=True)])  # (T, E)
    norms = np.linalg.norm(products, axis=-1)
    total = norms.sum()
    shares = norms / total if total > 0 else norms
    return InputGradients(products.sum(-1), shares, float(scores[0]))


@dataclass(frozen=True)
class Integral:
    """Integrated gradients of one target, from embeddings of zeros.

    Attributes:
        contributions: (T,), whose sum is `difference`, but for the error.
        difference: the score less that of zeros.
        error: how far the sum is from it, as a share.
    """

    contributions: Array
    difference: float
    error: float


@dataclass(frozen=True)
class Interval:
    """A part of the way from zeros to the embeddings."""

    low: float
    high: float
    scores: tuple[float, float]  # at its ends
    contributions: Array  # (T,)

    @property
    def error(self) -> float:
        """How far the contributions' sum is from the difference of the scores at the ends."""
        return abs(float(self.contributions.sum()) - (self.scores[1] - self.scores[0]))


def integrate(score: Score, embeddings: Sequence[Array]) -> Integral:
    """Return the integrated gradients (Sundararajan et al., 2017) of embeddings (T, E).

    The interval that misses the difference of its ends' scores the most is divided, until all of them
    together miss it by half a hundredth. Norms make scores change most near zeros, by many powers of ten.
    """

    def measure(low: float, high: float, scores: tuple[float, float]) -> Interval:
        points, weights = np.polynomial.legendre.leggauss(POINTS)
        places = (low + (high - low) * (points + 1) / 2).astype(np.float32)
        shares = (weights * (high - low) / 2).astype(np.float32)
        step = max(1, MAX_TOKENS // sum(map(len, embeddings)))
        parts = []
        for i in range(0, POINTS, step):
            gradients, _ = score([places[i : i + step, None, None] * each for each in embeddings])
            means = [np.tensordot(shares[i : i + step], gradient, 1) for gradient in gradients]  # (T, E)
            products = [(mean * each).sum(-1) for mean, each in zip(means, embeddings, strict=True)]
            parts.append(np.concatenate(products))
        return Interval(low, high, scores, np.sum(parts, axis=0))

    def measure_at(place: float) -> float:
        _, scores = score([np.float32(place) * each[None] for each in embeddings])
        return float(scores[0])

    ends = (measure_at(0.0), measure_at(1.0))
    difference = ends[1] - ends[0]
    allowed = TOLERANCE * max(abs(difference), MIN_CHANGE)
    intervals = [measure(0.0, 1.0, ends)]
    while sum(each.error for each in intervals) > allowed and len(intervals) < MAX_INTERVALS:
        worst = max(intervals, key=lambda each: each.error)
        intervals.remove(worst)
        middle = math.sqrt(worst.low * worst.high) or worst.high / 16
        at_middle = measure_at(middle)
        intervals.append(measure(worst.low, middle, (worst.scores[0], at_middle)))
        intervals.append(measure(middle, worst.high, (at_middle, worst.scores[1])))
    contributions = np.sum([each.contributions for each in intervals], axis=0)
    off = abs(float(contributions.sum()) - difference)
    return Integral(contributions, difference, off / max(abs(difference), MIN_CHANGE))
