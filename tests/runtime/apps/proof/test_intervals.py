"""Intervals and tests, compared with scipy's and scikit-learn's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import f1_score

from planforge.runtime.apps.proof.intervals import (
    RESAMPLES,
    find_f1_chance,
    find_f1_interval,
    find_mcnemar_probability,
    find_perplexity_chance,
    find_perplexity_interval,
    find_wilson_interval,
)

DRAWN = 400
# Of a share near one half, estimated from so many resamples here and there: 5 standard deviations.
CHANCE_ERROR = 5 * math.sqrt(0.25 / RESAMPLES + 0.25 / DRAWN)


def draw_labels(count: int, right: float, seed: int, truth: Any = None) -> Any:
    """Labels of three classes, which are as often `truth`."""
    random = np.random.default_rng(seed)
    drawn = random.choice(3, count, p=(0.6, 0.3, 0.1))
    return drawn if truth is None else np.where(random.random(count) < right, truth, drawn)


@pytest.mark.parametrize(("right", "count"), [(0, 7), (7, 7), (80, 100), (1, 1), (4321, 9999)])
def test_wilsons_interval_is_scipys(right: int, count: int) -> None:
    found = find_wilson_interval(right / count, count)
    want = stats.binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert found[1:] == pytest.approx((want.low, want.high), abs=1e-12)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (0, 5), (0, 6), (3, 10), (10, 3), (500, 620), (7, 7)])
def test_mcnemars_test_is_the_binomial_one(gained: int, lost: int) -> None:
    want = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert find_mcnemar_probability(gained, lost) == pytest.approx(want, rel=1e-9)


def test_f1_is_scikit_learns_in_every_resample() -> None:
    """Also of classes that a resample, or the answers, lack."""
    for seed in range(20):
        truth = draw_labels(12, 0, seed)
        answers = draw_labels(12, 0.5, seed + 100, truth)
        want = f1_score(truth, answers, average="macro")
        assert find_f1_interval(truth.tolist(), answers.tolist()).value == pytest.approx(want, abs=1e-12)


def test_the_interval_of_f1_is_the_bootstraps() -> None:
    truth = draw_labels(300, 0, 1)
    answers = draw_labels(300, 0.7, 2, truth)
    found = find_f1_interval(truth.tolist(), answers.tolist())
    want = stats.bootstrap(
        (truth, answers),
        lambda a, b: f1_score(a, b, average="macro"),
        **{"paired": True, "vectorized": False, "n_resamples": 300, "method": "percentile", "rng": 3},
    )
    # An end's own error: 5 standard errors of a 2.5 % quantile of 300 normal draws, in the bootstrap's own.
    density = stats.norm.pdf(stats.norm.ppf(0.025))
    error = 5 * math.sqrt(0.025 * 0.975 / 300) / density * want.standard_error
    assert found[1:] == pytest.approx(tuple(want.confidence_interval), abs=error)


@pytest.mark.parametrize("right", [0.8, 0.7, 0.6])
def test_the_chance_of_f1_is_a_permutation_tests(right: float) -> None:
    truth = draw_labels(200, 0, 1)
    old = draw_labels(200, 0.8, 2, truth)
    new = draw_labels(200, right, 3, truth)
    want = stats.permutation_test(
        (old, new),
        lambda a, b: f1_score(truth, b, average="macro") - f1_score(truth, a, average="macro"),
        **{"permutation_type": "samples", "n_resamples": DRAWN, "rng": 4},
    ).pvalue
    found = find_f1_chance(truth.tolist(), old.tolist(), new.tolist())
    assert found == pytest.approx(want, abs=CHANCE_ERROR)
    assert found == find_f1_chance(truth.tolist(), old.tolist(), new.tolist())  # its seed is fixed


def test_the_chance_of_losses_is_exact_where_all_ways_are_counted() -> None:
    """4 texts that all lost: 2 of 16 ways are as uneven, and no number of texts below 6 is a regression."""
    found = find_perplexity_chance([1.0, 2.0, 3.0, 4.0], [1.1, 2.3, 3.2, 4.7])
    assert found == pytest.approx(2 / 16, abs=CHANCE_ERROR)
    assert find_perplexity_chance([1.0] * 40, [1.0] * 40) == 1.0
    assert find_perplexity_chance([1.0] * 40, [1.1] * 40) < 0.01
    assert find_perplexity_chance([1.1] * 40, [1.0] * 40) < 0.01  # better, and no chance either


def test_the_interval_of_perplexity_holds_the_truth_as_often_as_it_says() -> None:
    """Of 200 drawn sets of texts, 95 % hold it: at least 180, by 3.2 standard deviations of the binomial."""
    random = np.random.default_rng(5)
    held = 0
    for _ in range(200):
        losses = random.gamma(9.0, 1 / 3, 60) * 10
        found = find_perplexity_interval(losses.tolist(), [10] * 60)
        held += found.low <= math.exp(3.0) <= found.high
    assert held >= 180
