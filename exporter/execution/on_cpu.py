"""Opens graphs on ONNX Runtime's CPU, also those with weights in fp4, for which it has no kernel."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ...runtime.backends.backend import Array
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.backends.ort_program import OrtProgram, list_disabled
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ..errors import VerificationError
from ..number_formats import NVFP4
from ..passes.build import replace_value
from ..passes.unrounded import skip_rounding
from ..passes.weight_files import load_graph
from ..passes.weights import add_initializer, make_lazy_tensor
from ..precisions import PRECISIONS
from .small_types import OPERATOR, dequantize

FP4 = ir.DataType.FLOAT4E2M1


def open_on_cpu(bundle: Bundle, artifact: Artifact) -> OrtProgram:
    """Open a graph; one with weights in fp4 has the values that their codes stand for in their place.

    An imported one computes without the rounding of activations that its author chose: see `unrounded`.
    """
    in_fp4 = PRECISIONS[artifact.precision].format == NVFP4
    if not in_fp4 and not bundle.manifest.source.get("exporter"):
        return OrtCpuBackend(spinning=False).open(bundle, artifact)
    model = load_graph(bundle.path(artifact.file))
    if in_fp4:
        store_values(model.graph)
        RemoveUnusedNodesPass()(model)
    elif not skip_rounding(model):
        return OrtCpuBackend(spinning=False).open(bundle, artifact)
    with TemporaryDirectory(prefix="planforge-graph-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "graph.onnx")
        ir.save(model, path, external_data="weights.data")
        return OrtProgram(path, disabled=list_disabled(artifact), spinning=False)


def store_values(graph: ir.Graph) -> None:
    """Replace each weight in fp4 by its values, in the type that its products read."""
    for node in list(graph):
        if node.op_type != OPERATOR or node.inputs[0] is None or node.inputs[0].dtype != FP4:
            continue
        codes = find_tensor(node.inputs[0])
        scale, *zeros = (read_scale(value) for value in node.inputs[1:] if value is not None)
        read = partial(read_values, node, codes, scale, *zeros)
        result = node.outputs[0]
        assert result.dtype is not None and result.name is not None
        tensor = make_lazy_tensor(read, codes.shape.numpy(), result.dtype.numpy(), result.name)
        replace_value(result, add_initializer(graph, f"{result.name}.values", tensor))


def read_values(node: ir.Node, codes: ir.TensorProtocol, scale: Array, *zeros: Array) -> Array:
    """Return what a node gives; it need not be in a graph any more."""
    return dequantize(node, codes.numpy(), scale, *zeros)


def read_scale(value: ir.Value) -> Array:
    """Return a constant, or what a node dequantizes of constants."""
    producer = value.producer()
    if producer is None or producer.op_type != OPERATOR:
        return find_tensor(value).numpy()
    codes, *others = (find_tensor(own) for own in producer.inputs if own is not None)
    scale, *zeros = (other.numpy() for other in others)
    return read_values(producer, codes, scale, *zeros)


def find_tensor(value: ir.Value) -> ir.TensorProtocol:
    """Return a constant's tensor."""
    if value.const_value is None:
        raise VerificationError(f"{value.name!r} is not a constant, as a weight in fp4 and its scales are")
    return value.const_value
