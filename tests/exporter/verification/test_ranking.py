"""How the order of texts is compared: against scipy's tau, and orders that are changed on purpose."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import kendalltau

from planforge.runtime.apps.check.metrics import measure_vectors
from planforge.runtime.apps.check.ranking import BEST, measure_ranking

TEXTS = 48
Vectors: TypeAlias = "list[npt.NDArray[np.float32]]"


@pytest.fixture
def vectors() -> Vectors:
    """Vectors (1, 16) of texts."""
    return list(np.random.default_rng(3).standard_normal((TEXTS, 1, 16)).astype(np.float32))


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan"])
def test_the_same_vectors_find_the_same_texts(similarity: str, vectors: Vectors) -> None:
    same = measure_ranking(vectors, vectors, similarity)
    assert (same.rank_changes, same.kendall_tau, same.rows) == (0.0, 1.0, TEXTS * BEST)
    longer = [2 * vector for vector in vectors]
    assert measure_ranking(longer, vectors, "cosine").rank_changes == 0.0


def test_order_is_that_of_scipy(vectors: Vectors) -> None:
    random = np.random.default_rng(4)
    noisy = [vector + 0.3 * random.standard_normal(vector.shape).astype(np.float32) for vector in vectors]
    found = measure_ranking(noisy, vectors, "dot")
    taus, changes = [], []
    ours, its = (np.concatenate(side) @ np.concatenate(side).T for side in (noisy, vectors))
    for number in range(TEXTS):
        own, wanted = (np.delete(scores[number], number) for scores in (ours, its))
        taus.append(kendalltau(own, wanted).statistic)
        best = [set(np.argsort(-scores)[:BEST].tolist()) for scores in (own, wanted)]
        changes.append(1 - len(best[0] & best[1]) / BEST)
    assert 0.05 < found.rank_changes < 0.5
    assert found.rank_changes == pytest.approx(np.mean(changes), abs=1e-12)
    assert found.kendall_tau == pytest.approx(np.mean(taus), abs=1e-12)


def test_vectors_of_tokens_are_ranked_by_their_best_products() -> None:
    random = np.random.default_rng(5)
    texts = [random.standard_normal((3 + number % 4, 8)).astype(np.float32) for number in range(TEXTS)]
    turned = [vectors[::-1].copy() for vectors in texts]  # MaxSim sees no order of tokens
    assert measure_ranking(turned, texts, "maxsim").rank_changes == 0.0
    cut = [vectors[:1] for vectors in texts]
    assert measure_ranking(cut, texts, "maxsim").rank_changes > 0.2


def test_what_is_not_finite_finds_nothing(vectors: Vectors) -> None:
    bad = [*vectors[:-1], np.full_like(vectors[-1], np.nan)]
    found = measure_ranking(bad, vectors, "cosine")
    assert not found.finite and found.rank_changes == 1.0


def test_texts_that_are_equal_may_come_in_any_order() -> None:
    """As those that a vocabulary knows no word of."""
    random = np.random.default_rng(6)
    same = [np.ones((1, 16), np.float32)] * TEXTS
    noisy = [vector + 1e-3 * random.standard_normal(vector.shape).astype(np.float32) for vector in same]
    assert measure_ranking(noisy, same, "cosine").rank_changes == 0.0


def test_the_unit_of_sparse_weights_is_not_that_of_their_zeros() -> None:
    random = np.random.default_rng(7)
    weights = np.zeros((8, 3000), np.float32)
    weights[:, ::60] = random.uniform(0.5, 3.0, (8, 50))
    noisy = weights + 0.2 * (weights > 0)
    spread = float(weights[weights > 0].std())
    assert weights.std() < spread / 2
    assert measure_vectors(noisy, weights).max_error == pytest.approx(0.2 / spread, rel=1e-4)
    nothing = np.zeros((2, 4), np.float32)
    assert measure_vectors(nothing, nothing).max_error == 0.0
