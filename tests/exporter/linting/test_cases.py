"""The small graphs that break lint's rules for TensorRT-RTX; its parser or builder must refuse each."""

from __future__ import annotations

from planforge.exporter.linting.rules import RULES
from planforge.exporter.targets import TARGETS

from ...helpers.lint_cases import BAD


def test_every_case_breaks_a_rule_that_there_is() -> None:
    assert {case.rule for case in BAD} <= {rule.id for rule in RULES if rule.holds(TARGETS["rtx"])}
    assert len({case.name for case in BAD}) == len(BAD)
