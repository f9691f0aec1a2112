"""Limits that a user sets (`--limit`): they make verification stricter, and never looser."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping

from ...runtime.diagnostics.metrics import Comparison, Metrics, ScoreMetrics, VectorMetrics
from ...runtime.errors import InputError
from ..reference.passages import TextMetrics
from .report import VerificationReport

log = logging.getLogger("planforge")

# Metrics that a user can limit: of the others more is better, or they count.
ERRORS = {
    field.name
    for kind in (Metrics, VectorMetrics, ScoreMetrics, TextMetrics)
    for field in dataclasses.fields(kind)
} - {"top1_agreement", "top5_agreement", "finite", "rows"}


def check_limits(limits: Mapping[str, float]) -> None:
    """Refuse limits of what is no error, and limits that are no numbers from 0."""
    if bad := [name for name, limit in limits.items() if not limit >= 0]:  # NaN is not
        raise InputError(f"limit of {bad[0]!r} must be 0 or more")
    if unknown := set(limits) - ERRORS:
        raise InputError(f"limit of {min(unknown)!r}: what can be limited is {', '.join(sorted(ERRORS))}")


def tighten_limits(report: VerificationReport, limits: Mapping[str, float]) -> VerificationReport:
    """Return a report that holds metrics to a user's limits too; refuse those that nothing has."""
    measured = {name.rpartition(".")[2] for comparison in report.comparisons for name in comparison.metrics}
    if unknown := set(limits) - measured:
        raise InputError(
            f"limit of {min(unknown)!r}: nothing here is measured by it, only by"
            f" {', '.join(sorted(measured & ERRORS))}"
        )
    for name, limit in limits.items():
        usual = [c.limits[n] for c in report.comparisons for n in c.limits if n.rpartition(".")[2] == name]
        if usual and limit >= max(usual):
            log.warning("--limit %s=%g changes nothing: the usual one is %.3g", name, limit, max(usual))
    return dataclasses.replace(
        report, comparisons=tuple(apply_limits(comparison, limits) for comparison in report.comparisons)
    )


def apply_limits(comparison: Comparison, limits: Mapping[str, float]) -> Comparison:
    own = {
        name: min(limits[metric], comparison.limits.get(name, math.inf))
        for name in comparison.metrics
        if (metric := name.rpartition(".")[2]) in limits
    }
    found = list(comparison.failures)
    for name, limit in own.items():
        value = comparison.metrics[name]
        if limit < comparison.limits.get(name, math.inf) and value is not None and not value <= limit:
            found.append(f"{name} is {value:.3g}, at most {limit:.3g} is wanted")
    return dataclasses.replace(
        comparison, limits={**comparison.limits, **own}, failures=tuple(dict.fromkeys(found))
    )
