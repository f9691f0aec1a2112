"""Converts graphs to the precisions of a bundle, with what calibration chose, and writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from ...runtime.apps.stage_progress import BYTES, StageCounter
from ...runtime.bundle.manifest import Artifact, FileEntry
from ..bundle.names import name_by_content
from ..errors import ExportError
from ..graphs import is_cache
from ..passes.encoder_attention import fuse_attention
from ..passes.fp16 import convert_to_fp16
from ..passes.kv_cache import quantize_cache
from ..passes.storage import FORMS
from ..passes.tables import split_shared_table
from ..passes.weight_files import move_weights
from ..passes.weights import save_with_shared_weights
from ..passes.winograd import multiply_in_winograds_domain
from ..precisions import PRECISIONS
from ..tracing.graph_check import check_graph
from .calibration import Calibration


def write_graphs(
    graphs: Mapping[str, ir.Model],
    artifacts: Sequence[Artifact],
    calibration: Calibration,
    folder: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Artifact], dict[str, FileEntry]]:
    """Convert each planned graph from its recipe's fp32 graph, and write it; write each weights file once.

    Returns:
        The artifacts with their opsets and the names of their files, and the files' entries by these names.
    """
    named: dict[str, str] = {}
    opsets: dict[str, int] = {}
    entries: dict[str, FileEntry] = {}
    (folder / "onnx").mkdir()
    for data in dict.fromkeys(name for artifact in artifacts for name in artifact.data):
        kind = PRECISIONS[next(a.precision for a in artifacts if data in a.data)].weights
        progress(f"writing ONNX files: {kind}")
        sharing = {a.file: a for a in artifacts if data in a.data}
        models = {
            Path(file).name: convert_graph(graphs[a.recipe_id], a, calibration) for file, a in sharing.items()
        }
        count = StageCounter(progress, f"writing ONNX files: {kind}", BYTES)
        save_with_shared_weights(models, folder / "onnx", Path(data).name, count)
        opsets |= {file: models[Path(file).name].opset_imports[""] for file in sharing}
        for file, (path, entry) in name_graphs(folder / "onnx", models, Path(data).name).items():
            named[f"onnx/{file}"] = f"onnx/{path.name}"
            entries[f"onnx/{path.name}"] = entry
    written = [
        replace(a, opset=opsets[a.file], file=named[a.file], data=tuple(named[name] for name in a.data))
        for a in artifacts
    ]
    return written, entries


def name_graphs(folder: Path, models: Mapping[str, ir.Model], data: str) -> dict[str, tuple[Path, FileEntry]]:
    """Name the file of weights by its content, then the graphs, which have its name in them."""
    found = {data: name_by_content(folder / data)}
    for file, model in models.items():
        move_weights(model, {data: found[data][0].name})
        ir.save(model, folder / file)
        found[file] = name_by_content(folder / file)
    return found


def convert_graph(graph: ir.Model, artifact: Artifact, calibration: Calibration) -> ir.Model:
    """Return a copy of a graph in the artifact's precision."""
    precision = PRECISIONS[artifact.precision]
    graph = graph.clone()
    try:
        weights = calibration.weights[precision.weights] if precision.weight_bits else None
        rounds_products = weights is not None and bool(weights.products) and artifact.dialect == "ort"
        if artifact.fuses_scores or rounds_products:
            fuse_attention(graph)
        if artifact.fuses_scores and any(node.op_type == "Softmax" for node in graph.graph):
            raise ValueError("an attention has a form that is not written as one node")
        if weights is not None:
            for form in precision.storage[artifact.dialect]:
                FORMS[form].store(graph, weights)
        elif artifact.dialect == "ort" and not precision.is_half:
            split_shared_table(graph)
            if artifact.graph == "unet":
                multiply_in_winograds_domain(graph)
        if precision.is_half:
            specs = (*artifact.inputs, *artifact.outputs)
            others = [spec.name for spec in specs if not is_cache(spec)]
            convert_to_fp16(graph, others, calibration.fp32_nodes.get(artifact.recipe_id))
        if precision.cache_bits:
            quantize_cache(graph, calibration.cache_scales)
    except ValueError as error:
        raise ExportError(f"{artifact.id}: {error}") from error
    check_graph(graph, artifact.inputs, artifact.outputs)
    return graph
