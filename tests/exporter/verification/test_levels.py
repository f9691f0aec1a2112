"""How much each level of verification computes, and what it says of that."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from planforge.exporter import verify
from planforge.exporter.levels import FULL, LEVELS, STANDARD, parse_verify
from planforge.exporter.reference.decoder_samples import thin_passages
from planforge.exporter.reference.draw import count_alike, count_step_rows, count_tokens
from planforge.runtime.errors import InputError


@pytest.mark.parametrize("weights", [10**6, 124 * 10**6, 10**9, 7 * 10**9])
def test_no_level_computes_more_than_the_next(weights: int) -> None:
    sizes = list(range(1, 9))
    costs = [
        (
            level.count_text(weights),
            level.count_context(weights),
            count_tokens(weights, level),
            count_alike(weights, sizes, level),
        )
        for level in LEVELS.values()
    ]
    for less, more in itertools.pairwise(costs):
        assert all(a <= b for a, b in zip(less, more, strict=True))


def test_the_work_of_standard_is_bounded_by_the_weights_alone() -> None:
    for weights in (10**8, 10**9, 10**10):
        assert count_tokens(weights, STANDARD) <= max(STANDARD.least_drawn, STANDARD.draw_work / weights)
        assert STANDARD.count_context(weights) * weights <= STANDARD.context_work + 256 * weights
        assert count_step_rows(weights, count_tokens(weights, STANDARD) // 2, STANDARD) <= 8


def test_passages_are_thinned_to_so_many_tokens() -> None:
    passages = [tuple(range(100))] * 5
    assert thin_passages(passages, FULL.count_text(10**9)) == passages
    assert list(map(len, thin_passages(passages, 250))) == [100, 100]
    assert list(map(len, thin_passages(passages, 30))) == [30]


def test_what_verify_takes() -> None:
    assert parse_verify(True) is STANDARD and parse_verify(False) is None and parse_verify("full") is FULL
    with pytest.raises(InputError, match="level 'ful' is not one of quick, standard, full; did you mean"):
        parse_verify("ful")


def test_a_quick_verdict_says_what_it_left_out(demo_bundle: Path) -> None:
    only = ["decoder.ort.fp32"]
    quick = verify(demo_bundle, only=only, level="quick")
    usual = verify(demo_bundle, only=only)
    assert quick.passed and usual.passed
    assert quick.level == "quick" and usual.level == "standard"
    cases = {comparison.case for comparison in quick.comparisons}
    assert {"attributes and weights", "prefill and decode, batch 1"} < cases
    assert len(quick.comparisons) < len(usual.comparisons)
    assert "full context" not in cases and not [case for case in cases if "drawn" in case]
    assert "drawn batches, and single steps at every position" in quick.left_out
    assert quick.describe_level().startswith("Verified at the level quick: a smoke test, without ")
    assert json.loads(json.dumps(quick.to_json()))["left_out"] == list(quick.left_out)
    assert quick.gates()[only[0]]["level"] == "quick"
