"""Compares systems by the results of cases: rows of tables, and of plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .measure import TIMES, value_of

Result = Mapping[str, Any]

PLANFORGE = "PlanForge"
STATES = {"per_s": "in turns", "row_per_s": "in a row"}


@dataclass(frozen=True)
class Row:
    """The results of each system in one case and class of precision; of a system's variants the best.

    Attributes:
        labels: the values as text, with the cost of precision.
    """

    title: str
    metric: str
    values: dict[str, float]
    labels: dict[str, str]


def comparisons(results: Mapping[str, Result], in_a_row: bool = False) -> list[Row]:
    """Return the cases in which PlanForge has peers.

    Args:
        results: by their cases' names.
        in_a_row: adds a row for works in a row below that for works in turns, where both were measured.
    """
    rows = []
    for result in results.values():
        if alone(result):
            continue
        classes: dict[str, list[Result]] = {}
        for figures in result["entries"].values():
            classes.setdefault(figures["did"]["precision"], []).append(figures)
        states = STATES if in_a_row and measured_in_a_row(result) else {result["metric"]: ""}
        what, colon, unit = result["title"].rpartition(": ")
        for precision, entries in classes.items():
            for metric, state in states.items():
                parts = (what, precision if len(classes) > 1 else "", state)
                title = f"{', '.join(filter(None, parts))}{colon}{unit}"
                rows.append(compare_systems(title, metric, entries))
    return rows


def compare_systems(title: str, metric: str, entries: Sequence[Result]) -> Row:
    """Return the row of each system's best entry."""
    values: dict[str, float] = {}
    labels = {}
    better = min if metric in TIMES else max
    for figures in entries:
        system = figures["system"]
        value = value_of(figures, metric)
        assert value is not None
        if system not in values or better(value, values[system]) != values[system]:
            values[system] = value
            labels[system] = number(value) + fidelity(figures)
    return Row(title, metric, values, labels)


def fidelity(figures: Result) -> str:
    """Return the cosine of an entry's vectors to fp32's, where it has vectors of fewer bits."""
    if figures["did"]["precision"] == "fp32" or "cosine_mean" not in figures:
        return ""
    return f" (cosine {figures['cosine_mean']:.4f}, least {figures['cosine_min']:.4f})"


def measured_in_a_row(result: Result) -> bool:
    """Tell whether a case's systems worked in a row too."""
    return any("row_per_s" in figures for figures in result["entries"].values())


def alone(result: Result) -> bool:
    return all(figures["system"] == PLANFORGE for figures in result["entries"].values())


def number(value: float | None) -> str:
    """Return a number with three digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
