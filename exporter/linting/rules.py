"""The one table of rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ..targets import lint_targets
from . import (
    attention_rules,
    cpu_rules,
    dimension_rules,
    graph_rules,
    mask_rules,
    operator_rules,
    type_rules,
    weight_rules,
)
from .rule import Rule

Section: TypeAlias = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, columns, rows

RULES: tuple[Rule, ...] = (
    *graph_rules.RULES,
    *weight_rules.RULES,
    *operator_rules.RULES,
    *attention_rules.RULES,
    *type_rules.RULES,
    *mask_rules.RULES,
    *dimension_rules.RULES,
    *cpu_rules.RULES,
)


def list_targets_and_rules() -> list[Section]:
    """Return all targets and all rules with their sources, for a terminal."""
    targets = [(t.name, t.about, f"{t.opsets[0]} to {t.opsets[1]}", t.source) for t in lint_targets(())]
    rules = [(rule.id, rule.severity, list_engines(rule), rule.about, rule.source) for rule in RULES]
    return [
        ("targets", ("target", "what it is", "opsets", "source"), targets),
        ("rules", ("rule", "severity", "engines", "what it finds", "source"), rules),
    ]


def list_engines(rule: Rule) -> str:
    """Return the engines that a rule holds for, in at least one version."""
    return " ".join(dict.fromkeys(t.engine for t in lint_targets(()) if rule.holds(t)))
