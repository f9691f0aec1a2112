"""Converts graphs to the precisions of a bundle, with what calibration chose, and writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.bundle.manifest import Artifact
from ..errors import ExportError
from ..graphs import find_recipe_id, is_cache
from ..passes.fp16 import ConvertToFp16
from ..passes.int8_encoder import QuantizeEncoder
from ..passes.kv_cache import QuantizeCache
from ..passes.quantize import QuantizeWeights
from ..passes.tables import SplitSharedTable
from ..passes.weights import save_with_shared_weights
from ..precisions import PRECISIONS
from ..tracing.graph_check import check_graph
from .calibration import Calibration

if TYPE_CHECKING:
    import onnx_ir as ir


def write_graphs(
    graphs: Mapping[str, ir.Model], artifacts: Sequence[Artifact], calibration: Calibration, folder: Path
) -> None:
    """Convert every planned graph, from those by recipe id; write it, and each weights file once."""
    (folder / "onnx").mkdir()
    for data in dict.fromkeys(name for artifact in artifacts for name in artifact.data):
        sharing = {a.file: a for a in artifacts if data in a.data}
        models = {
            Path(file).name: convert_graph(graphs[find_recipe_id(a)], a, calibration)
            for file, a in sharing.items()
        }
        save_with_shared_weights(models, folder / "onnx", Path(data).name)


def convert_graph(graph: ir.Model, artifact: Artifact, calibration: Calibration) -> ir.Model:
    """Return a copy of a graph in the artifact's precision."""
    precision = PRECISIONS[artifact.precision]
    graph = graph.clone()
    try:
        if artifact.precision == "fp16":
            outputs = [spec.name for spec in artifact.outputs if not is_cache(spec)]
            ConvertToFp16(outputs, calibration.fp32_nodes.get(find_recipe_id(artifact)))(graph)
        if artifact.precision == "int8" and calibration.products:
            QuantizeEncoder(calibration.products)(graph)
        if precision.weight_bits:
            blocks = calibration.blocks[precision.weight_bits]
            QuantizeWeights(precision.weight_bits, blocks.size, dict(blocks.done))(graph)
        elif artifact.dialect == "ort" and artifact.precision != "fp16":
            SplitSharedTable()(graph)
        if precision.cache_bits:
            QuantizeCache(calibration.cache_scales)(graph)
    except ValueError as error:
        raise ExportError(f"{artifact.id}: {error}") from error
    check_graph(graph, artifact.inputs, artifact.outputs)
    return graph
