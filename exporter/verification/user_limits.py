"""Applies limits that a user sets (`--limit`): they make verification stricter, and never looser."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping

from ...runtime.apps.check.metrics import (
    LabelMetrics,
    Metrics,
    RankingMetrics,
    ScoreMetrics,
    TextMetrics,
    VectorMetrics,
)
from ...runtime.apps.check.outcome import MORE_IS_BETTER, Comparison, keeps_limit
from ...runtime.errors import InputError
from .report import VerificationReport

log = logging.getLogger("planforge")

# Metrics that a user can limit: the others are counts.
LIMITABLE = {
    field.name
    for kind in (Metrics, LabelMetrics, VectorMetrics, RankingMetrics, ScoreMetrics, TextMetrics)
    for field in dataclasses.fields(kind)
} - {"finite", "rows"}


def check_limits(limits: Mapping[str, float]) -> None:
    """Refuse limits of metrics that cannot have one, limits below 0, and shares above 1."""
    if bad := [name for name, limit in limits.items() if not limit >= 0]:  # NaN is not
        raise InputError(f"limit of {bad[0]!r} must be 0 or more")
    for name, limit in limits.items():
        metric = name.rpartition(".")[2]
        if metric not in LIMITABLE:
            raise InputError(f"limit of {name!r}: the metric is not one of {', '.join(sorted(LIMITABLE))}")
        if metric in MORE_IS_BETTER and limit > 1:
            raise InputError(f"limit of {name!r}: it is a share, which must be at most 1")


def tighten_limits(report: VerificationReport, limits: Mapping[str, float]) -> VerificationReport:
    """Return a report that applies a user's limits too; refuse limits whose metric nothing has.

    A limit is of a metric, as in "max_error", or of one output's alone, as in "logits.max_error".
    """
    measured = {name for comparison in report.comparisons for name in comparison.metrics}
    by_metric = {name.rpartition(".")[2] for name in measured}
    if unknown := set(limits) - measured - by_metric:
        name = min(unknown)
        metric = name.rpartition(".")[2]
        there = {one for one in measured if one.endswith(f".{metric}")} or by_metric & LIMITABLE
        raise InputError(
            f"limit of {name!r}: it was not measured here; measured were {', '.join(sorted(there))}"
        )
    for name, limit in limits.items():
        usual = [c.limits[n] for c in report.comparisons for n in c.limits if is_limit_of(name, n)]
        if usual and limit >= max(usual):
            log.warning("--limit %s=%g changes nothing: the usual one is %.3g", name, limit, max(usual))
    return dataclasses.replace(
        report, comparisons=tuple(apply_limits(comparison, limits) for comparison in report.comparisons)
    )


def is_limit_of(limited: str, name: str) -> bool:
    """Tell whether a limit applies to a metric: by its whole name, or by the part behind its output's."""
    return limited in (name, name.rpartition(".")[2])


def apply_limits(comparison: Comparison, limits: Mapping[str, float]) -> Comparison:
    """Return a comparison judged by a user's limits too, where they are stricter."""
    own: dict[str, float] = {}
    found = list(comparison.failures)
    for name, value in comparison.metrics.items():
        given = [limit for limited, limit in limits.items() if is_limit_of(limited, name)]
        if not given:
            continue
        least = name.rpartition(".")[2] in MORE_IS_BETTER
        usual = comparison.limits.get(name, 0.0 if least else math.inf)
        own[name] = max(usual, *given) if least else min(usual, *given)
        if own[name] != usual and value is not None and not keeps_limit(name, value, own[name]):
            wanted = "at least" if least else "at most"
            found.append(f"{name} is {value:.3g}, {wanted} {own[name]:.3g} is wanted")
    return dataclasses.replace(
        comparison, limits={**comparison.limits, **own}, failures=tuple(dict.fromkeys(found))
    )
