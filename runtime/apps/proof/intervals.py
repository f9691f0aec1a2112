"""Intervals of what was measured, and how likely chance makes two measurements of the same texts differ.

N texts, K classes, R resamples
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

CONFIDENCE = 0.95
DEVIATIONS = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
RESAMPLES = 2000
SEED = 0
ROUNDING = 1e-9  # of a difference that is the same, summed in another order
MOST_DRAWN = 2**22  # numbers that are drawn at a time


class Interval(NamedTuple):
    """A measured value, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def find_wilson_interval(share: float, count: int, deviations: float = DEVIATIONS) -> Interval:
    """Return Wilson's score interval of a share of `count` draws.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, 1927.
    """
    squared = deviations**2
    middle = share + squared / (2 * count)
    half = deviations * math.sqrt(share * (1 - share) / count + squared / (4 * count**2))
    scale = 1 + squared / count
    return Interval(share, max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))


def measure_macro_f1(truth: Array, answers: Array, weights: Array) -> Array:
    """Return the F1 of the classes that occur, averaged: (R,) of weights (R, N) of N pairs of classes.

    A class counts that is the truth or the answer of a pair whose weight is not 0, as in scikit-learn.
    """
    total = np.zeros(len(weights))
    classes = np.zeros(len(weights))
    for label in np.union1d(truth, answers):
        is_true = truth == label
        is_answer = answers == label
        right = weights[:, is_true & is_answer].sum(-1)
        counted = weights[:, is_true].sum(-1) + weights[:, is_answer].sum(-1)  # 2 tp + fp + fn
        total += 2 * right / np.maximum(counted, 1)
        classes += counted > 0
    return np.asarray(total / classes)


def resample(measure: Callable[[Array], Array], counts: Sequence[int] | Array) -> Interval:
    """Return a measure and its interval by the percentile bootstrap, with a fixed seed.

    Source: B. Efron, Bootstrap methods: another look at the jackknife, 1979.

    Args:
        measure: takes weights (R, C), how often each kind of text was drawn, and returns (R,).
        counts: how many texts there are of each of C kinds: 1 of each where no two are alike.
    """
    kinds = np.asarray(counts)
    number = int(kinds.sum())
    random = np.random.default_rng(SEED)
    step = max(1, MOST_DRAWN // len(kinds))
    found = []
    for begin in range(0, RESAMPLES, step):
        size = min(step, RESAMPLES - begin)
        if len(kinds) == number:  # the same, and quicker
            rows = [np.bincount(random.integers(number, size=number), minlength=number) for _ in range(size)]
            drawn = np.stack(rows)
        else:
            drawn = random.multinomial(number, kinds / number, size=size)
        found.append(measure(drawn))
    low, high = np.quantile(np.concatenate(found), ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Interval(float(measure(kinds[None])[0]), float(low), float(high))


def find_f1_interval(truth: Sequence[int], answers: Sequence[int]) -> Interval:
    """Return the macro F1 of answers, with its interval."""
    (true, given), counts = count_kinds(truth, answers)
    return resample(lambda weights: measure_macro_f1(true, given, weights), counts)


def find_f1_chance(truth: Sequence[int], old: Sequence[int], new: Sequence[int]) -> float:
    """Return how likely chance makes the macro F1 of two answers to each text differ as much as it does."""
    (true, before, after), counts = count_kinds(truth, old, new)

    def measure(swapped: Array) -> Array:
        kept = counts - swapped
        sides = [np.concatenate(pair, -1) for pair in ((kept, swapped), (swapped, kept))]
        both = np.concatenate((true, true)), np.concatenate((before, after))
        return measure_macro_f1(*both, sides[1]) - measure_macro_f1(*both, sides[0])

    return find_chance(measure, counts)


def find_perplexity_interval(losses: Sequence[float], tokens: Sequence[int]) -> Interval:
    """Return the perplexity by texts' losses in nats and their tokens; texts are what is resampled."""
    nats = np.asarray(losses)
    lengths = np.asarray(tokens)
    return resample(lambda weights: np.exp(weights @ nats / (weights @ lengths)), np.ones(len(nats), int))


def find_perplexity_chance(old: Sequence[float], new: Sequence[float]) -> float:
    """Return how likely chance makes the losses of two models on each text differ as much as they do."""
    differences = np.asarray(new) - np.asarray(old)
    return find_chance(lambda swapped: (1 - 2 * swapped) @ differences, np.ones(len(differences), int))


def find_chance(measure: Callable[[Array], Array], counts: Array) -> float:
    """Return the two-sided probability of a difference, by a paired randomization test with a fixed seed.

    If two models are equal, it is chance which of a text's two results is whose: results of texts are swapped
    at random. Source: E. W. Noreen, Computer intensive methods for testing hypotheses, 1989.

    Args:
        measure: takes (R, C), how many texts of each kind are swapped, and returns differences (R,).
        counts: how many texts there are of each of C kinds.
    """
    random = np.random.default_rng(SEED)
    found = abs(float(measure(np.zeros((1, len(counts)), int))[0]))
    least = found * (1 - ROUNDING)
    step = max(1, MOST_DRAWN // len(counts))
    as_large = 1  # what was found is a possible outcome too
    for begin in range(0, RESAMPLES, step):
        size = (min(step, RESAMPLES - begin), len(counts))
        drawn = (
            random.integers(2, size=size) if counts.max() == 1 else random.binomial(counts, 0.5, size=size)
        )
        as_large += int((np.abs(measure(drawn)) >= least).sum())
    return as_large / (RESAMPLES + 1)


def count_kinds(*columns: Sequence[int]) -> tuple[Array, Array]:
    """Return the different rows of columns as (columns, C), and how many there are of each."""
    kinds, counts = np.unique(
        np.stack([np.asarray(column) for column in columns], -1), axis=0, return_counts=True
    )
    return kinds.T, counts


def find_mcnemar_probability(gained: int, lost: int) -> float:
    """Return the probability that as uneven a split is chance: the two-sided exact test of McNemar.

    Source: Q. McNemar, Note on the sampling error of the difference between correlated proportions or
    percentages, 1947; exact, by the binomial distribution.

    Args:
        gained: texts that only the new answers have right.
        lost: texts that only the old answers have right.
    """
    number = gained + lost
    term = tail = 1
    for k in range(min(gained, lost)):
        term = term * (number - k) // (k + 1)
        tail += term
    return float(min(1.0, 2 * tail / 2**number))
