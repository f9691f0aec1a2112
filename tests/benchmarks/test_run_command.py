"""The benchmark of `planforge run` compares the same answers, and its ratios are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.run_command import Side, compare, measure_command, prompts_of


def test_both_sides_answer_the_same_prompts(demo_bundle: Path) -> None:
    found = measure_command(demo_bundle, rounds=1, count=3, new_tokens=4)
    assert min(found["command_start_s"], found["generate_start_s"]) > 0
    assert len(found["command_rounds_s"]) == len(found["generate_rounds_s"]) == 1


@pytest.mark.parametrize(
    ("command", "ratio", "without_start", "met"),
    [(10.9, 1.09, 1.05, True), (12.1, 1.21, 1.2, False), (10.0, 1.0, 0.938, True)],
)
def test_ratios_are_of_medians_with_the_start_and_without(
    command: float, ratio: float, without_start: float, met: bool
) -> None:
    slow = Side((), whole=[99.0, command, 0.0], start=[2.5, 2.2, 9.0])
    fast = Side((), whole=[10.0, 10.0, 11.0], start=[2.0, 1.0, 3.0])
    found = compare(slow, fast)
    assert (found["ratio"], found["ratio_without_start"], found["met"]) == (ratio, without_start, met)


def test_a_fast_start_does_not_hide_slow_work() -> None:
    found = compare(Side((), whole=[10.0], start=[0.0]), Side((), whole=[10.0], start=[2.0]))
    assert (found["ratio"], found["ratio_without_start"], found["met"]) == (1.0, 1.25, False)


def test_prompts_differ() -> None:
    prompts = prompts_of(64)
    assert len(set(prompts)) == 64
    assert {len(prompt.split()) for prompt in prompts} == set(range(3, 13))
