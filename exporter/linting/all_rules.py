"""The one table of rules."""

from __future__ import annotations

from collections.abc import Sequence

from ..targets import NAMES, find_targets
from . import (
    attention_rules,
    cpu_rules,
    cuda_rules,
    dimension_rules,
    graph_rules,
    mask_rules,
    operator_rules,
    type_rules,
    weight_rules,
)
from .rule import Rule

SECTIONS = (
    graph_rules,
    weight_rules,
    operator_rules,
    attention_rules,
    type_rules,
    mask_rules,
    dimension_rules,
    cpu_rules,
    cuda_rules,
)
RULES: tuple[Rule, ...] = tuple(
    found for section in SECTIONS for found in vars(section).values() if isinstance(found, Rule)
)


def list_targets_and_rules() -> list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    """Return all targets and all rules with their sources as tables: title, columns, rows."""
    targets = [(t.name, t.about, f"{t.opsets[0]} to {t.opsets[1]}", t.source) for t in find_targets(())]
    rules = [(rule.id, rule.severity, list_engines(rule), rule.about, rule.source) for rule in RULES]
    return [
        ("targets", ("target", "what it is", "opsets", "source"), targets),
        ("rules", ("rule", "severity", "engines", "what it finds", "source"), rules),
    ]


def list_engines(rule: Rule) -> str:
    """Return the engines that a rule holds for, in at least one version."""
    return " ".join(dict.fromkeys(t.engine for t in find_targets(NAMES) if rule.holds(t)))
