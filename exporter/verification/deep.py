"""Makes a bundle's graphs from the checkpoint once more, and compares them node for node with its own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

import onnx_ir as ir

from ...runtime.apps.check.metrics import Comparison
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.export_again import name_checkpoint
from ...runtime.bundle.manifest import Artifact, Manifest
from ..calibration.calibration import Calibration
from ..calibration.convert import convert_graph
from ..errors import VerificationError
from ..passes.canonical import Difference, compare_graphs
from ..passes.fp16_ranges import choose_fp32_nodes
from ..passes.storage import read_weights
from ..passes.weight_files import load_graph
from ..passes.weights import Stored
from ..tasks.base import Progress
from .attributes import describe_node
from .explain import remove_fitted_head
from .structure import list_weights, report_reading, shorten

if TYPE_CHECKING:
    from .explain import Tracer

CASE = "node for node, as exported again"


def refuse_deep(bundle: Bundle, has_checkpoint: bool) -> None:
    """Refuse to make graphs again that cannot be."""
    exporter = bundle.manifest.source.get("exporter")
    if exporter:
        raise VerificationError(
            f"--deep makes graphs from the checkpoint again, and {exporter} made those of {bundle.folder}:"
            " leave it out; all else is compared without"
        )
    if not has_checkpoint:
        raise VerificationError(
            f"--deep makes graphs from the checkpoint again; pass --source {name_checkpoint(bundle)}"
        )


def compare_deeply(
    bundle: Bundle, calibration: Calibration, trace: Tracer, progress: Progress
) -> list[Comparison]:
    """Compare each graph with what this version exports from the checkpoint, with the same choices."""
    artifacts = (*bundle.manifest.artifacts, *bundle.manifest.explanations)
    recipes = list(dict.fromkeys(artifact.recipe_id for artifact in artifacts))
    progress(f"tracing {', '.join(recipes)} again")
    traced = trace(recipes)
    found = []
    for artifact in artifacts:
        progress(f"comparing {CASE}: {artifact.id}")
        found.append(compare_artifact(bundle, artifact, traced[artifact.recipe_id], calibration))
    return found


def compare_artifact(
    bundle: Bundle, artifact: Artifact, traced: ir.Model, calibration: Calibration
) -> Comparison:
    """Compare a graph with a healthy one in fp32, which is converted to its precision."""
    bare = remove_fitted_head(artifact, bundle.manifest)
    names = [spec.name for spec in bare.outputs]
    meant = convert_graph(traced, bare, calibration)
    graph = load_graph(bundle.path(artifact.file)).graph
    held = list_held_constants(meant.graph, traced.graph)
    faults = [describe(difference) for difference in compare_graphs(graph, meant.graph, names, held)]
    if artifact.precision == "fp16":
        faults += list_missing_fp32(traced, artifact, calibration)
    faults = shorten(faults)
    if faults and (other := describe_tools(bundle.manifest)):
        faults.append(other)
    return report_reading(artifact.id, CASE, len(graph), faults)


def list_held_constants(graph: ir.Graph, traced: ir.Graph) -> set[str]:
    """Return the parameters and parts of quantized weights by their names: reading holds what is in them."""
    tensors = [(value, constant) for value, constant, _ in list_weights(traced)]
    names = {Stored.read(value).parameter for value, constant in tensors if constant.size > 1}
    return names | {str(value.name) for weight in read_weights(graph) for value in weight.constants}


def describe(difference: Difference) -> str:
    """Return a difference in words, with its node and module."""
    if difference.node is None:
        where = "" if difference.other is None else f"before {describe_node(difference.other)}: "
        return f"the graph {where}{difference.what}"
    return f"{describe_node(difference.node)} {difference.what}"


def list_missing_fp32(traced: ir.Model, artifact: Artifact, calibration: Calibration) -> list[str]:
    """Return the nodes that must be in fp32 whatever they calculate, and are not marked so."""
    must = choose_fp32_nodes(traced.graph, {})
    chosen = calibration.fp32_nodes.get(artifact.recipe_id, {})
    return [
        f"node {name!r} is not in fp32: {choice.reason}"
        for name, choice in must.items()
        if name not in chosen
    ]


def describe_tools(manifest: Manifest) -> str:
    """Return which tools made the bundle in another version than is here; "" if none."""
    tools: Mapping[str, str] = {name: version(name) for name in ("planforge", "torch", "onnx")}
    apart = [
        f"{name} {manifest.tools[name]}, here is {own}"
        for name, own in tools.items()
        if manifest.tools.get(name, own) != own
    ]
    return f"the bundle was made with {'; '.join(apart)}, which may write other graphs" if apart else ""
