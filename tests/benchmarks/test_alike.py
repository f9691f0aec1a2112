"""The benchmarks refuse to compare unlike work, and say what differs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.alike import REPORTED, UnlikeWorkError, abbreviate, check_alike, differences

DESCRIPTION: dict[str, Any] = {
    "weights_sha256": "ab12",
    "precision": "8-bit",
    "threads": 2,
    "cache": "fp32",
    "prompts": [[5, 6, 7], [8, 9, 10]],
    "new_tokens": [64, 64],
    "beams": 1,
    "prefill_logit_rows": 2,
    "eos": "off",
}


def test_the_same_work_is_compared() -> None:
    check_alike("generate", {"a": DESCRIPTION, "b": dict(DESCRIPTION), "c": dict(DESCRIPTION)}, {})
    check_alike("generate", {}, {})


@given(st.sampled_from(REPORTED["generate"]), st.integers(1, 2), st.booleans())
def test_any_difference_is_refused_by_its_name(key: str, place: int, missing: bool) -> None:
    found = [dict(DESCRIPTION) for _ in range(3)]
    if missing:
        del found[place][key]
    else:
        found[place][key] = "something else"
    with pytest.raises(UnlikeWorkError, match=f"{'report ' if missing else ''}{key}") as refusal:
        check_alike("generate", dict(zip("abc", found, strict=True)), {})
    assert f"{'abc'[place]} " in str(refusal.value)


def test_every_difference_is_named_at_once() -> None:
    other = {**DESCRIPTION, "threads": 4, "prompts": [[5, 6, 7], [8, 1, 10]], "new_tokens": [64, 64, 64]}
    with pytest.raises(UnlikeWorkError) as refusal:
        check_alike("generate", {"ours": DESCRIPTION, "theirs": other}, {})
    assert "threads of ours is 2, of theirs 4" in str(refusal.value)
    assert "prompts of ours is 9 at [1][1], of theirs 1 at [1][1]" in str(refusal.value)
    assert "new_tokens of ours is 2 long, of theirs 3 long" in str(refusal.value)


def test_a_declared_difference_passes_for_the_system_that_declared_it() -> None:
    all_rows = {**DESCRIPTION, "prefill_logit_rows": 6}
    check_alike(
        "generate", {"ours": DESCRIPTION, "theirs": all_rows}, {"theirs": {"prefill_logit_rows": "so it is"}}
    )
    with pytest.raises(UnlikeWorkError, match="prefill_logit_rows of ours is 2, of third 6"):
        check_alike(
            "generate",
            {"ours": DESCRIPTION, "theirs": all_rows, "third": all_rows},
            {"theirs": {"prefill_logit_rows": "so it is"}},
        )
    assert differences(DESCRIPTION, all_rows) == ["prefill_logit_rows"]


def test_a_part_that_only_a_declared_system_reports_not_is_still_missing() -> None:
    short = {key: value for key, value in DESCRIPTION.items() if key != "eos"}
    with pytest.raises(UnlikeWorkError, match="theirs does not report eos"):
        check_alike("generate", {"ours": DESCRIPTION, "theirs": short}, {"theirs": {"eos": "so it is"}})


@given(st.lists(st.integers(), min_size=1), st.data())
def test_of_sequences_the_first_difference_is_shown(values: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(values) - 1))
    other = [*values[:place], values[place] + 1, *values[place + 1 :]]
    assert abbreviate(values, other) == (f"{values[place]} at [{place}]", f"{values[place] + 1} at [{place}]")
