"""The form of a lint rule, and of the places where a graph breaks it."""

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
    """One place where a rule is broken."""

    what: str  # what is wrong, with its numbers; the same words wherever it is the same fault
    node: ir.Node | None = None  # where, unless it is about a tensor or the whole graph
    tensor: str = ""  # the name of an input, output or weight
    # Where they differ from the rule's.
    severity: Severity | None = None
    fix: str = ""
    source: str = ""


@dataclass(frozen=True)
class Rule:
    """A rule: something that a target refuses or computes wrongly."""

    id: str  # its name in reports
    severity: Severity  # of its findings
    about: str  # what it finds, in a line
    fix: str  # the way out
    source: str  # an address, or with what it was measured
    holds: Callable[[Target], bool]  # for which targets
    check: Check  # where a graph breaks it
    alike: bool = False  # whether it finds the same for all targets that build plans


def accept_all(target: Target) -> bool:
    return True


def accept_plans(target: Target) -> bool:
    return target.plans


def accept_cpu(target: Target) -> bool:
    return not target.plans


def make_rule(
    about: str,
    *,
    fix: str,
    severity: Severity = "error",
    source: str = RTX_MEASURED,
    holds: Callable[[Target], bool] = accept_plans,
    alike: bool = False,
) -> Callable[[Check], Rule]:
    """Return a decorator that makes the rule "some-fault" of a function named check_some_fault."""

    def make(check: Check) -> Rule:
        rule_id = check.__name__.removeprefix("check_").replace("_", "-")
        return Rule(rule_id, severity, about, fix, source, holds, check, alike)

    return make
