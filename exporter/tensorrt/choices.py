"""Chooses the precisions and GPUs that plans are built for, and says why others get none."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ...runtime.backends.architectures import describe_sms, find_sm
from ...runtime.backends.tensorrt_library import LIBRARIES, is_installed
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.errors import BackendUnavailableError, InputError
from ..errors import BuildError, BuildOptionError
from ..precisions import PRECISIONS
from ..targets import Target, find_target
from .build import resolve_architectures
from .hardware import Need, describe_unmet, find_weight_need
from .plan_graphs import find_plan_graphs, group_by_precision

log = logging.getLogger("planforge")


@dataclass(frozen=True)
class Group:
    """The graphs of one precision, whose plans are of no use without each other, and their GPUs."""

    graphs: Sequence[Artifact]
    architectures: tuple[str, ...]
    left_out: str = ""  # which GPUs get no plan, and why


def is_elsewhere(target_name: str) -> bool:
    """Tell whether a target's plans are built elsewhere: by JetPack's own TensorRT, if it is not here."""
    return target_name.startswith("jetpack") and not is_installed(find_target(target_name).engine)


def make_board_error(target_name: str, hint: str, bundle: str) -> BackendUnavailableError:
    """Return the error that says where the plans of a board are built; `hint` brings a bundle there."""
    return BackendUnavailableError(
        f"a plan for {target_name} is built on the board, by JetPack's own TensorRT: {hint} there, then"
        f" `planforge build {shlex.quote(bundle)} --target {target_name}`; if this is the board, `planforge"
        " doctor` says what is missing"
    )


def check_target(target_name: str, precisions: Sequence[str]) -> None:
    """Refuse a board that PlanForge does not run on, and a target without plans in any of the precisions."""
    target = find_target(target_name)
    if is_elsewhere(target_name) and target.version < (8, 6):
        raise BackendUnavailableError(
            f"{target_name} has TensorRT only for Python 3.8, and PlanForge needs 3.10: write the graph for"
            " trtexec instead, as in docs/deploy/jetson.md"
        )
    reasons = [explain_missing(target, name) for name in list_halves(precisions)]
    if reasons and all(reasons):
        instead = list_instead(target, target.sms)
        raise InputError(f"target {target_name!r}: {'; '.join(reasons)}: take {instead} instead")


def check_kernels(target_name: str, precisions: Sequence[str], sms: Sequence[str]) -> None:
    """Refuse GPUs that were named and have no kernels for any of the precisions of plans."""
    needs = [find_weight_need(name) for name in list_halves(precisions)]
    unmet = [need for need in needs if need is not None]
    out = [sm for sm in sms if unmet and not any(need is None or need.is_met(sm) for need in needs)]
    if out:
        oldest: Need = min(unmet, key=lambda need: need.sm)
        names = ",".join(out)
        raise InputError(
            f"--sm {names} {'has' if len(out) == 1 else 'have'} no kernels for"
            f" {' and '.join(dict.fromkeys(need.what for need in unmet))}, which begin with {oldest.gpu}:"
            f" leave {names} out, or take {list_instead(find_target(target_name), out)} instead"
        )


def explain_missing(target: Target, precision: str) -> str:
    """Return why a target has no plans in a precision; "" where it can have some."""
    if reason := target.refuse_version(precision):
        return reason
    need = find_weight_need(precision)
    if need is None or not target.sms or any(need.is_met(sm) for sm in target.sms):
        return ""
    return f"{precision} needs a GPU of {need.gpu} or newer, not {describe_sms(target.sms)}"


def list_halves(precisions: Sequence[str]) -> list[str]:
    """Return the precisions that compute in fp16, as plans do; unknown names are left out."""
    return [name for name in precisions if name in PRECISIONS and PRECISIONS[name].is_half]


def list_instead(target: Target, sms: Sequence[str]) -> str:
    """Return, in words, the precisions of any model's plans that a target has for GPUs."""
    *others, last = (
        name
        for name, kind in PRECISIONS.items()
        if kind.is_half and "inplace" in kind.dialects
        if not target.refuse_version(name) and has_kernels(name, sms)
    )
    return f"{', '.join(others)} or {last}" if others else last


def has_kernels(precision: str, sms: Sequence[str]) -> bool:
    """Tell whether all of these GPUs have kernels for a precision's weights."""
    need = find_weight_need(precision)
    return need is None or all(need.is_met(find_sm(sm)) for sm in sms)


def choose_groups(
    bundle: Bundle, target_name: str, sms: Sequence[str] | None
) -> tuple[list[Group], list[BuildError]]:
    """Return the graphs that get plans, and why other precisions get none.

    Raises:
        BuildError: none gets a plan.
    """
    groups: list[Group] = []
    refused: list[BuildError] = []
    for together in group_by_precision(find_plan_graphs(bundle, find_target(target_name).dialect)):
        try:
            groups.append(choose_architectures(bundle, together, target_name, sms))
        except BuildError as error:
            refused.append(error)
    if not groups:
        raise refused[0]
    return groups, refused


def choose_architectures(
    bundle: Bundle, graphs: Sequence[Artifact], target_name: str, sms: Sequence[str] | None
) -> Group:
    """Return the GPUs to build for, named or the engine's own.

    Left out are those that have no kernel for what a graph computes, unless they are named.

    Raises:
        BuildOptionError: such a GPU was named.
        BuildError: none is left, or the engine is too old.
    """
    target = find_target(target_name)
    every = LIBRARIES[target.engine].sms
    if missing := explain_missing(target, graphs[0].precision):
        raise BuildError(f"{graphs[0].id}: {missing}")
    if not every:
        return Group(graphs, tuple(sms or ()))
    wanted = resolve_architectures(target.engine, sms or every)
    unmet = {graph.id: describe_unmet(bundle.path(graph.file), every) for graph in graphs}
    able = [sm for sm in every if not any(sm in found for found in unmet.values())]
    out = [sm for sm in wanted if sm not in able]
    if not out:
        return Group(graphs, tuple(wanted))
    newest = max(out, key=every.index)
    name, reason = next((graph, found[newest]) for graph, found in unmet.items() if newest in found)
    instead = "it does in ONNX Runtime (--target cuda)"
    if not has_kernels(graphs[0].precision, out):
        instead = f"take {list_instead(target, out)} there"
    why = (
        f"{name} does not run on {describe_sms(out)} in {target.engine}, which has no kernels there for"
        f" {reason}; {instead}"
    )
    left = [sm for sm in wanted if sm in able]
    if sms:
        others = f"--sm {','.join(left or able)}" if able else "a target of ONNX Runtime"
        raise BuildOptionError(f"--sm {','.join(sms)}: {why}. Leave out {', '.join(out)}: {others}")
    if not left:
        raise BuildError(why)
    return Group(graphs, tuple(left), f"no plan for {', '.join(out)}: {why}")


def warn_of_left_out(bundle: Bundle, targets: Sequence[str], sms: Sequence[str] | None) -> None:
    """Log the GPUs and precisions that get no plan, before long work begins; refuse what gives no plan."""
    for name in targets:
        engine = find_target(name).engine
        if engine in LIBRARIES and is_installed(engine):
            groups, refused = choose_groups(bundle, name, sms)
            for group in groups:
                if group.left_out:
                    log.warning("%s", group.left_out)
            warn_of_refused(refused)


def warn_of_refused(refused: Sequence[BuildError]) -> None:
    """Log why some precisions get no plan."""
    for error in refused:
        log.warning("one precision gets no plan: %s", error)
