"""Evidence of two bundles compared: what is a regression, and which measurements are compared."""

from __future__ import annotations

import pytest

from planforge.runtime.apps.proof.changes import compare_proofs, pair_proofs
from planforge.runtime.errors import InputError

from .conftest import LABELS, make_proof, make_scores


@pytest.mark.parametrize(
    ("lost", "gained", "regressed"),
    [(5, 0, False), (6, 0, True), (0, 9, False), (12, 3, True), (12, 4, False), (0, 0, False)],
)
def test_accuracy_regresses_where_mcnemars_test_says_so(lost: int, gained: int, regressed: bool) -> None:
    """Of 6 flips 2 in 64 are as uneven, of 5 2 in 32; 12 of 15 have p = 0.035, 12 of 16 p = 0.077.

    A comparison of the two intervals, which overlap, or with old and new exchanged, says otherwise.
    """
    truth = [0] * 200
    old = [1] * gained + [0] * (200 - gained)
    new = [0] * gained + [1] * lost + [0] * (200 - gained - lost)
    accuracy = compare_proofs(make_proof(truth, old), make_proof(truth, new)).changes[0]
    assert (accuracy.measure, accuracy.is_regression) == ("accuracy", regressed)
    assert accuracy.new - accuracy.old == pytest.approx((gained - lost) / 200)
    back = compare_proofs(make_proof(truth, new), make_proof(truth, old)).changes[0]
    assert back.is_regression is (lost < gained and back.chance <= 0.05)


def test_f1_regresses_where_a_rare_class_is_lost() -> None:
    """Accuracy is as before: 8 of the rare class were lost, and 8 of the others gained."""
    truth = [0] * 90 + [1] * 10
    old = [1] * 8 + [0] * 82 + [1] * 10
    new = [0] * 90 + [0] * 8 + [1] * 2
    accuracy, f1 = compare_proofs(make_proof(truth, old), make_proof(truth, new)).changes
    assert accuracy.old == accuracy.new and not accuracy.is_regression
    assert f1.measure == "f1" and f1.new < f1.old
    assert f1.is_regression == (f1.chance <= 0.05)
    worse = compare_proofs(make_proof(truth, truth), make_proof(truth, new)).changes[1]
    assert worse.is_regression


def test_perplexity_regresses_beyond_chance() -> None:
    old = [20.0 + number % 7 for number in range(30)]
    for change, regressed in ((0.5, True), (-0.5, False), (0.0, False)):
        (found,) = compare_proofs(make_scores(old), make_scores([loss + change for loss in old])).changes
        assert (found.measure, found.is_regression) == ("perplexity", regressed)
    (noise,) = compare_proofs(
        make_scores(old), make_scores([loss + 0.3 * (-1) ** number for number, loss in enumerate(old)])
    ).changes
    assert not noise.is_regression
    with pytest.raises(InputError, match="read the texts as other tokens"):
        compare_proofs(make_scores(old), make_scores(old, tokens=(9,) * 30))
    with pytest.raises(InputError, match="were measured on other texts"):
        compare_proofs(make_scores(old), make_scores(old, data={"name": "e", "sha256": "2"}))


def test_labels_are_compared_by_name_and_the_likest_measurement_is_taken() -> None:
    truth = [0, 1, 2] * 10
    other = make_proof([2, 1, 0] * 10, [2, 1, 0] * 10, labels=LABELS[::-1])
    assert not compare_proofs(make_proof(truth, truth), other).is_regression
    old = [
        make_proof(truth, truth, artifact="encoder.ort.int8"),
        make_proof(truth, truth, backend="tensorrt"),
        make_proof(truth, truth, machine={"cpu": "d"}),
        make_proof(truth, truth, data={"name": "e", "sha256": "2"}),
    ]
    (pair,) = pair_proofs(old, [make_proof(truth, truth)])
    assert pair.old is old[2]
    assert pair_proofs(old[3:], [make_proof(truth, truth)]) == []


def test_what_cannot_be_compared_does_not_hide_the_others() -> None:
    old = [make_scores([1.0], tokens=(9,)), make_proof([0], [0], data={"name": "f", "sha256": "2"})]
    new = [make_scores([1.0]), make_proof([0], [0], data={"name": "f", "sha256": "2"})]
    first, second = pair_proofs(old, new)
    assert "read the texts as other tokens" in first.refused and not first.changes
    assert [change.measure for change in second.changes] == ["accuracy", "f1"] and not second.refused
    assert not first.is_regression
    several = [*old, make_scores([1.0, 2.0])]  # of which one has as many texts
    (pair,) = pair_proofs(several, [make_scores([2.0, 2.0])])
    assert pair.old is several[2] and pair.changes


def test_other_labels_of_the_same_texts_are_refused_by_name() -> None:
    truth = [0, 1, 2]
    with pytest.raises(InputError, match="or with other labels of them"):
        compare_proofs(make_proof(truth, truth), make_proof([0, 1, 1], truth))
    other = make_proof(truth, truth, labels=("a", "b", "c"))
    with pytest.raises(InputError, match="or with other labels of them"):
        compare_proofs(make_proof(truth, truth), other)
