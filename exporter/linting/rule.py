"""A rule, and the places where a graph breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from ..targets import RTX_MEASURED

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..targets import Target
    from .model import LintModel

    Check: TypeAlias = Callable[[LintModel, Target], Iterable["Hit"]]

# "error": fails there. "wrong": builds, and computes something else or NaN. "warning": slow, large, or
# only sometimes wrong.
Severity = Literal["error", "wrong", "warning"]
SEVERITIES: tuple[Severity, ...] = ("error", "wrong", "warning")


@dataclass(frozen=True)
class Hit:
    """One place where a rule is broken.

    Attributes:
        what: what is wrong, with its numbers; the same words wherever it is the same fault.
        node: where, unless it is about a tensor or the whole graph.
        tensor: the name of an input, output or weight.
        severity: where it differs from the rule's.
        fix: where it differs from the rule's.
        source: where it differs from the rule's.
    """

    what: str
    node: ir.Node | None = None
    tensor: str = ""
    severity: Severity | None = None
    fix: str = ""
    source: str = ""


@dataclass(frozen=True)
class Rule:
    """What a target refuses or gets wrong.

    Attributes:
        id: its name in reports.
        severity: of its findings.
        about: what it finds, in a line.
        fix: the way out.
        source: an address, or with what it was measured.
        holds: for which targets.
        check: where a graph breaks it.
        alike: whether it finds the same for all targets that build plans.
    """

    id: str
    severity: Severity
    about: str
    fix: str
    source: str
    holds: Callable[[Target], bool]
    check: Check
    alike: bool = False


def everywhere(target: Target) -> bool:
    """Accept every target."""
    return True


def for_plans(target: Target) -> bool:
    """Accept TensorRT and TensorRT-RTX."""
    return target.plans


def for_cpu(target: Target) -> bool:
    """Accept ONNX Runtime."""
    return not target.plans


def rule(
    rule_id: str,
    about: str,
    *,
    fix: str,
    severity: Severity = "error",
    source: str = RTX_MEASURED,
    holds: Callable[[Target], bool] = for_plans,
    alike: bool = False,
) -> Callable[[Check], Rule]:
    """Return a decorator that makes a rule of its check; the arguments are the attributes of `Rule`."""
    return lambda check: Rule(rule_id, severity, about, fix, source, holds, check, alike)
