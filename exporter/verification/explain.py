"""Finds the nodes at fault in the graphs that failed, and the references to compare them with.

Graphs of imports cannot be traced again, nor any without PyTorch: they have the bundle's own as references.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import onnx_ir as ir

from ...runtime.apps.check.failures import NodeFault
from ...runtime.backends.backend import Array
from ...runtime.bundle.artifact import has_role
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.export_again import extrapolates, read_chosen_outputs
from ...runtime.bundle.manifest import Artifact, Manifest
from ...runtime.errors import PlanForgeError
from ..calibration.calibration import Calibration
from ..calibration.convert import convert_graph
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.source import Source
from ..errors import VerificationError
from ..execution.replay import PADDING, Key, Replay
from ..graphs import describe_in_fp32, trace_graphs
from ..limits import CAPS
from ..passes.biases import split_bias_gelus
from ..passes.weight_files import load_graph
from ..precisions import PRECISIONS
from ..reference_model import is_module, restore_weights
from ..tasks.base import Progress
from ..tasks.fitted_head import HEAD, TAGS, is_fitted
from ..tasks.verifier import Verifier
from ..tracing.modules import find_module, find_module_results, read_results
from .bisect import (
    FirstMismatch,
    Tolerance,
    Tolerances,
    find_first_mismatch,
    make_module_tolerances,
    make_node_tolerances,
)
from .precision_errors import list_exceeded
from .report import VerificationReport
from .structure import READING

if TYPE_CHECKING:
    from torch import nn

    from ..reference_model import ReferenceModel

INSIDE = (
    "every node of it is within its tolerance, in a short padded batch and a step of one token: look at what"
    " feeds it (the cache, the padding), at longer texts, at several tokens on a past, or at small errors"
    " that add up"
)
LOSS = (
    "no node differs by more than rounding explains, so this precision may be too coarse for this model"
    " on these texts, as for untrained weights (docs/quantize.md): export another precision, verify with"
    " texts of your own by --prompts FILE, or skip the comparison with --no-verify; else look at what feeds"
    " it (the cache, the padding), or at longer texts"
)
LOST = (
    "PyTorch, rounded in the same way, has so large an error too, and no node differs by more than rounding"
    " explains (docs/quantize.md): export another precision, verify with texts of your own by --prompts FILE,"
    " or accept the error, as in --accept {}"
)
PADDED = (
    "single texts pass and padded batches do not, though no node of it left its tolerance there: look at what"
    " feeds it, the mask of the padding and the rows of the cache"
)
ADD_FP32 = (
    "it would be compared with the same graph in fp32, if that passed; where it is missing, add fp32 to"
    " --precision"
)
NO_REFERENCE = (
    "there is no reference to compare nodes with: pass --source CHECKPOINT, with weights that PyTorch reads,"
    " or export the same graph in another dialect, too, as with --target cpu,portable"
)

# Gives healthy graphs with their weights, in fp32, by their recipes' ids.
Tracer: TypeAlias = Callable[[Sequence[str]], Mapping[str, ir.Model]]
MakeReplay: TypeAlias = Callable[[Artifact], Replay]


def explain(
    verifier: Verifier,
    report: VerificationReport,
    progress: Progress,
    model: ReferenceModel | None = None,
    calibration: Calibration | None = None,
    trace: Tracer | None = None,
) -> VerificationReport:
    """Return the report with the first node at fault in each graph that failed."""
    bundle = verifier.bundle
    failed = report.failed_artifacts(bundle.manifest)
    # An encoder that failed gives its decoder wrong inputs already.
    encoders = {artifact.precision for artifact in failed if not artifact.reads_source}
    failed = [a for a in failed if not (a.reads_source and a.precision in encoders)]
    if not failed:
        return report
    if model is not None:
        restore_weights(model)
    manifest = Bundle.open(bundle.folder).manifest  # also of graphs that were not asked for
    sound = [a for a in manifest.artifacts if a.precision == "fp32" and a not in failed]
    read = {c.artifact: c for c in report.comparisons if c.backend == READING and not c.passed}

    def search(artifact: Artifact, fresh: ir.Model | None) -> FirstMismatch | None:
        if fresh is None and artifact.id in report.limited:
            return None
        mismatch = search_graph(verifier, report, artifact, manifest, sound, model, calibration, fresh)
        if mismatch is None or artifact.id not in read:
            return mismatch
        return prefer_static_fault(verifier, artifact, mismatch, read[artifact.id].failures)

    def give_reason(artifact: Artifact, fresh: ir.Model | None) -> str:
        if artifact.id in report.limited:
            return LOST.format(propose_acceptance(report, artifact.id))
        if artifact.id in read:  # what was read there names its node
            return ""
        return explain_no_mismatch(report, artifact, manifest, fresh is not None)

    found = name_nodes(report, failed, progress, trace if model is not None else None, search, give_reason)
    # A node at fault is not a loss of the precision, however much PyTorch itself loses.
    limited = report.limited - {mismatch.artifact for mismatch in found.mismatches}
    return dataclasses.replace(found, limited=limited)


def name_nodes(
    report: VerificationReport,
    failed: Sequence[Artifact],
    progress: Progress,
    trace: Tracer | None,
    search: Callable[[Artifact, ir.Model | None], FirstMismatch | None],
    give_reason: Callable[[Artifact, ir.Model | None], str],
) -> VerificationReport:
    """Return the report with the result of `search` for each graph that failed, or why it has none.

    Both are given the graph traced once more, if there is a tracer.
    """
    healthy: Mapping[str, ir.Model] = {}
    unexplained = dict(report.unexplained)
    if trace is not None:
        recipes = list(dict.fromkeys(artifact.recipe_id for artifact in failed))
        progress(f"tracing {', '.join(recipes)} again, to find the nodes at fault")
        try:
            healthy = trace(recipes)
        except PlanForgeError as error:  # the verdict stands without
            unexplained |= {artifact.id: f"no node can be named: {error}" for artifact in failed}
            return dataclasses.replace(report, unexplained=unexplained)
    mismatches = list(report.mismatches)
    for artifact in failed:
        progress(f"verifying {artifact.id}: looking for the node at fault")
        fresh = healthy.get(artifact.recipe_id)
        try:
            mismatch = search(artifact, fresh)
        except (PlanForgeError, ValueError) as error:
            unexplained[artifact.id] = f"no node can be named: {error}"
            continue
        if mismatch is not None:
            mismatches.append(mismatch)
        elif why := give_reason(artifact, fresh):
            unexplained[artifact.id] = why
    return dataclasses.replace(report, mismatches=tuple(mismatches), unexplained=unexplained)


def search_graph(
    verifier: Verifier,
    report: VerificationReport,
    artifact: Artifact,
    manifest: Manifest,
    sound: Sequence[Artifact],
    model: ReferenceModel | None,
    calibration: Calibration | None,
    fresh: ir.Model | None,
) -> FirstMismatch | None:
    """Return the first node at fault in a graph that failed, if one is.

    `fresh` is the same graph, traced again and not yet converted, where there is one; else those that are
    `sound` are the references. Where PyTorch loses as much, the graph is compared with the fresh one alone:
    rounding may move a result far from PyTorch's own.
    """
    graph = load_graph(verifier.bundle.path(artifact.file))
    traced = remove_fitted_head(artifact, manifest)
    for make_replay in list_replays(verifier, report, artifact.id):
        replay = make_replay(traced)
        if fresh is not None:
            assert model is not None and is_module(model) and calibration is not None
            references = convert_references(traced, replay, fresh, model, calibration)
            if artifact.id in report.limited:
                references = references[:1]
        else:
            references = find_references(verifier, make_replay, traced, graph, sound, model, calibration)
        mismatch = find_first_mismatch(graph, traced, replay, references)
        if mismatch is not None:
            return mismatch
    return None


def prefer_static_fault(
    verifier: Verifier, artifact: Artifact, mismatch: FirstMismatch, failures: Sequence[str]
) -> FirstMismatch | None:
    """Return a mismatch, or None where its result comes from a faulty node of another module.

    That one is the first at fault: the values of nodes between the results of modules are not known of
    imported graphs, and in fp16 a fault may hide in its own node's tolerance and leave that of a later one.
    Not so where a state in fp32 is read: what it spoils is read as faulty too, from the second step on.
    """
    if has_role(artifact.outputs, "next_state.") and artifact.precision == "fp32":
        return mismatch
    graph = load_graph(verifier.bundle.path(artifact.file)).graph
    accused = next((node for node in graph if mismatch.value in {value.name for value in node.outputs}), None)
    if accused is None:
        return mismatch
    others = [node for node in find_nodes_before(accused) if find_module(node) != mismatch.module]
    values = {value.name for node in others for value in node.outputs}
    is_read = any(isinstance(failure, NodeFault) and failure.value in values for failure in failures)
    return None if is_read else mismatch


def find_nodes_before(node: ir.Node) -> list[ir.Node]:
    """Return the nodes that a node's results come from, without itself."""
    found: dict[ir.Node, None] = {}
    waiting = [node]
    while waiting:
        for value in waiting.pop().inputs:
            before = None if value is None else value.producer()
            if before is not None and before not in found:
                found[before] = None
                waiting.append(before)
    return list(found)


def list_replays(verifier: Verifier, report: VerificationReport, artifact: str) -> list[MakeReplay]:
    """Return functions that make replays of a failed graph: a short one, then those of the failed rows."""
    locations = [c.location for c in report.comparisons if c.artifact == artifact and c.location is not None]
    return [
        verifier.make_replay,
        *(partial(verifier.make_location_replay, location=location) for location in locations),
    ]


def propose_acceptance(report: VerificationReport, artifact: str) -> str:
    """Return the values for --accept that would let a graph pass, a little rounded up."""
    wanted: dict[str, float] = {}
    for comparison in report.comparisons:
        if comparison.artifact == artifact:
            for name, value in list_exceeded(comparison).items():
                metric = name.rpartition(".")[2]
                wanted[metric] = max(wanted.get(metric, 0.0), math.inf if value is None else value)
    return " --accept ".join(f"{metric}={1.1 * value:.2g}" for metric, value in wanted.items())


def explain_no_mismatch(
    report: VerificationReport, artifact: Artifact, manifest: Manifest, traced: bool
) -> str:
    """Return the explanation of a failed graph none of whose nodes left its tolerance."""
    if artifact.id not in report.list_failed_alone():
        return PADDED
    if not PRECISIONS[artifact.precision].is_quantized:
        return INSIDE
    ids = {other.id for other in manifest.artifacts}
    by_nodes = traced or f"{artifact.recipe_id}.fp32" in ids
    return LOSS if by_nodes else f"{LOSS}; or add fp32 to --precision, which every node is compared with"


def remove_fitted_head(artifact: Artifact, manifest: Manifest) -> Artifact:
    """Return a graph without the classifier that was fitted to it afterwards."""
    if not is_fitted(manifest):
        return artifact
    return dataclasses.replace(
        artifact, outputs=tuple(s for s in artifact.outputs if s.role not in (HEAD, TAGS))
    )


def convert_references(
    artifact: Artifact, replay: Replay, healthy: ir.Model, model: nn.Module, calibration: Calibration
) -> list[Tolerances]:
    """Return the references: PyTorch, and a healthy graph in fp32 and in the artifact's precision."""
    full_artifact = describe_in_fp32(artifact)
    full = convert_graph(healthy, full_artifact, calibration)
    if PRECISIONS[artifact.precision].is_quantized:  # its products have the biases, the GELUs none
        split_bias_gelus(full.graph)
    own = convert_graph(healthy, artifact, calibration)
    rounding = calibration.make_rounding(artifact.precision)
    return [
        make_node_tolerances(replay, artifact, full, full_artifact, own),
        make_module_tolerances(replay, model, rounding, read_results(own)),
    ]


def find_references(
    verifier: Verifier,
    make_replay: MakeReplay,
    artifact: Artifact,
    graph: ir.Model,
    sound: Sequence[Artifact],
    model: ReferenceModel | None,
    calibration: Calibration | None,
) -> list[Tolerances]:
    """Return all references for a graph that failed; `sound` are the bundle's fp32 graphs that passed."""
    nodes: Tolerances = {}
    modules: Tolerances = {}
    replay = make_replay(artifact)
    twin = next((other for other in sound if other.recipe_id == artifact.recipe_id), None)
    if twin is not None and artifact.precision != "fp32":
        nodes = make_hidden_tolerances(verifier, replay, artifact.precision, twin)
    if model is not None and is_module(model):
        results = find_module_results(graph, [path for path, _ in model.named_modules()])
        rounding = None if calibration is None else calibration.make_rounding(artifact.precision)
        # Without a rounding PyTorch's tolerances are those of fp32, which no other precision could keep.
        if results and (rounding is not None or artifact.precision == "fp32"):
            modules = make_module_tolerances(replay, model, rounding, results)
    if not modules and artifact.precision == "fp32":
        others = [other for other in sound if other.graph == artifact.graph and other.id != artifact.id]
        modules = make_sibling_tolerances(verifier, make_replay, replay, graph, others[0]) if others else {}
    if not nodes and not modules:
        raise VerificationError(NO_REFERENCE if artifact.precision == "fp32" else ADD_FP32)
    return [nodes, modules]


def make_hidden_tolerances(
    verifier: Verifier, replay: Replay, precision: str, twin: Artifact
) -> dict[Key, Tolerance]:
    """Return the tolerances of hidden states, from the same graph in fp32.

    In scores, and in keys laid out for a product, padding cannot be told apart.
    """

    def choose(step: int, array: Array) -> Array | None:
        return replay.select_tokens(step, array) if array.ndim == 3 else None

    values = replay.collect_values(load_graph(verifier.bundle.path(twin.file)), twin, choose)
    return {key: Tolerance(array, CAPS[precision]["max_error"], twin.id) for key, array in values.items()}


def make_sibling_tolerances(
    verifier: Verifier, make_replay: MakeReplay, replay: Replay, graph: ir.Model, other: Artifact
) -> dict[Key, Tolerance]:
    """Return tolerances of modules' results, from a graph of another dialect in fp32 that has passed."""
    sibling = load_graph(verifier.bundle.path(other.file))
    others = make_replay(other)
    own = find_module_results(graph)
    theirs = {path: name for name, path in find_module_results(sibling).items()}
    values = others.collect_values(sibling, other, others.select_tokens)
    tolerances: dict[Key, Tolerance] = {}
    for step, twin in pair_steps(replay, others):
        for name, path in own.items():
            tokens = values.get((twin, theirs.get(path, "")))
            if tokens is not None:
                tolerances[step, name] = Tolerance(tokens, CAPS["fp32"]["max_error"], other.id)
    return tolerances


def pair_steps(replay: Replay, other: Replay) -> list[tuple[int, int]]:
    """Return the pairs of runs of two replays that compare the same tokens, as a dialect may split rows."""

    def list_compared(one: Replay) -> list[tuple[int, list[int]]]:
        steps = enumerate(one.steps)
        return [(i, s.positions[s.positions != PADDING].tolist()) for i, s in steps if s.is_compared]

    both = zip(list_compared(replay), list_compared(other), strict=False)
    return [(mine, theirs) for (mine, tokens), (theirs, same) in both if tokens == same]


def make_tracer(manifest: Manifest, source: Source, model: ReferenceModel) -> Tracer:
    """Return a function that traces a bundle's graphs once more from its checkpoint."""

    def trace(recipes: Sequence[str]) -> dict[str, ir.Model]:
        checkpoint = Checkpoint(
            source, None, manifest.max_length, read_chosen_outputs(manifest), extrapolates(manifest)
        )
        return trace_graphs(checkpoint, recipes, model)

    return trace
