"""Tells whether metrics are within their limits: the outcome of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .failures import Exceeded, Failure, NotFinite
from .metrics import Measured, make_plain

if TYPE_CHECKING:
    from .case import Location

MORE_IS_BETTER = (
    "top1_agreement",
    "top5_agreement",
    "kendall_tau",
)  # whose limits are the least that is wanted


@dataclass(frozen=True)
class Outcome:
    """The result of a comparison."""

    metrics: Mapping[str, Any]  # by name; None where not finite
    limits: Mapping[str, float]  # of some of the metrics
    failures: tuple[str, ...] = ()  # in words; of what is judged by limits they are `Failure`s
    errors: tuple[float, ...] = ()  # `max_error` of each decode step, where there are steps
    divergence: Mapping[str, Any] | None = None  # where the engine, free to choose, left PyTorch's tokens
    location: Location | None = None  # where it failed first, if that is known


@dataclass(frozen=True, kw_only=True)
class Comparison(Outcome):
    """One artifact on one engine, in one case, against PyTorch."""

    artifact: str
    backend: str
    case: str
    is_padded: bool = False  # as the case's own

    @classmethod
    def from_error(cls, artifact: str, backend: str, case: str, why: Exception) -> Comparison:
        """Return a comparison that failed because it could not be measured."""
        return cls(artifact=artifact, backend=backend, case=case, metrics={}, limits={}, failures=(str(why),))

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "artifact": self.artifact,
            "backend": self.backend,
            "case": self.case,
            "metrics": dict(self.metrics),
            "limits": dict(self.limits),
            "passed": self.passed,
            "failures": list(self.failures),
        }
        if self.errors:
            value["errors"] = [make_plain(error) for error in self.errors]
        if self.divergence is not None:
            value["divergence"] = dict(self.divergence)
        return value


def judge_outcome(
    metrics: Measured,
    limits: Mapping[str, float],
    prefix: str = "",
    failures: Sequence[str] = (),
    errors: Sequence[float] = (),
    names: Sequence[str] | None = None,
) -> Outcome:
    """Return the outcome of metrics, of which those with `names`, or all that have a limit, are judged.

    The limits' names begin with `prefix`; other failures, and the error of each decode step, are added. Older
    golden data has names that no metric has: the KL divergence of labels that have no distribution.
    """
    judged = [name for name in metrics.LIMITED if names is None or name in names]
    applied = {name: limits[prefix + name] for name in judged}
    exceeded = judge(metrics, applied, prefix)
    return Outcome(
        metrics={f"{prefix}{name}": value for name, value in metrics.to_json().items()},
        limits={f"{prefix}{name}": limit for name, limit in applied.items()},
        failures=(*exceeded, *failures),
        errors=tuple(errors),
    )


def locate_failure(outcome: Outcome, where: str, location: Location) -> Outcome:
    """Return an outcome that failed, with the words for the place where it did so first, and the place."""
    first, *others = outcome.failures
    assert isinstance(first, Failure)
    return replace(outcome, failures=(first.add(f", {where}"), *others), location=location)


def judge(metrics: Measured, limits: Mapping[str, float], prefix: str = "") -> tuple[Failure, ...]:
    """Return what exceeds its limit; NaN always does. `prefix` is what its name begins with in messages."""
    failures: list[Failure] = [] if metrics.finite else [NotFinite(f"{prefix}NaN or infinity in the results")]
    for name, limit in limits.items():
        value = getattr(metrics, name)
        if not value <= limit:  # NaN is not <= anything
            failures.append(Exceeded.of(f"{prefix}{name}", value, limit))
    return tuple(failures)


def keeps_limit(name: str, value: float | None, limit: float) -> bool:
    """Tell whether a metric keeps its limit; what is not finite keeps none."""
    if value is None:
        return False
    return value >= limit if name.rpartition(".")[2] in MORE_IS_BETTER else value <= limit
