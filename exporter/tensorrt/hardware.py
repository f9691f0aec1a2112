"""Finds computations that TensorRT-RTX has no kernels for on older GPUs; measured with 1.7.1.116."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.backends.architectures import describe_sm
from ..precisions import PRECISIONS

if TYPE_CHECKING:
    # Only functions import onnx: a command that builds no plan loads without it.
    from onnx import GraphProto, NodeProto

PRODUCTS = ("MatMul", "Gemm", "Einsum", "LSTM", "GRU", "RNN")  # Attention and Conv have kernels there
# Element types by ONNX's numbers. A double is computed as a float.
FLOATS = (1, 11)
BFLOAT16_TYPE = 16


@dataclass(frozen=True)
class Need:
    """A computation of a node that only some GPUs support, and the oldest of them."""

    what: str
    sm: int

    @property
    def gpu(self) -> str:
        """Return the oldest architecture that supports it, with GPUs that have it."""
        return describe_sm(f"sm{self.sm}")

    def is_met(self, sm: str) -> bool:
        """Tell whether an architecture such as "sm86" supports it."""
        return int(sm.removeprefix("sm")) >= self.sm


FP32_PRODUCT = Need("a product in fp32", 80)
BFLOAT16 = Need("bfloat16", 80)
INT4 = Need("int4", 80)
FP8 = Need("fp8", 89)
FP4 = Need("fp4", 120)
# By ONNX's number of an element type, of which the first that a node has decides.
NEEDS = {23: FP4, 17: FP8, 22: INT4, BFLOAT16_TYPE: BFLOAT16}


def find_need(operator: str, inputs: Sequence[int | None], outputs: Sequence[int | None]) -> Need | None:
    """Return the needs of one of ONNX's own operators; None where every GPU supports it.

    `inputs` and `outputs` are element types by ONNX's numbers, None where one is not known.
    """
    types = (*inputs, *outputs)
    for number, need in NEEDS.items():
        if number in types:
            return need
    is_product = operator in PRODUCTS and not (operator == "Einsum" and len(inputs) == 1)
    return FP32_PRODUCT if is_product and inputs and inputs[0] in FLOATS else None


def find_weight_need(precision: str) -> Need | None:
    """Return the needs of a precision's quantized weights; None where every GPU supports it."""
    format = PRECISIONS[precision].format
    return None if format is None else NEEDS.get(format.element_type)


def list_needs(path: Path) -> Iterator[tuple[str, Need]]:
    """Yield the names of the nodes that need something of a GPU, without reading external data."""
    import onnx
    import onnx.shape_inference

    model = onnx.load(path, load_external_data=False)
    with suppress(Exception):  # of a damaged graph onnx infers nothing; TensorRT's parser will say so
        model = onnx.shape_inference.infer_shapes(model)
    nodes, types = collect_nodes(model.graph)
    for node in nodes:
        inputs = [types.get(name) for name in node.input]
        need = None if node.domain else find_need(node.op_type, inputs, [types.get(n) for n in node.output])
        if need is not None:
            yield node.name or node.output[0], need


def collect_nodes(graph: GraphProto) -> tuple[list[NodeProto], dict[str, int]]:
    """Return all nodes of a graph, those of branches too, and the element types of values by their names."""
    nodes = list(graph.node)
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        types[value.name] = value.type.tensor_type.elem_type
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                inside, own = collect_nodes(attribute.g)
                nodes += inside
                types = {**own, **types}
    return nodes, types


def describe_unmet(path: Path, sms: Sequence[str]) -> dict[str, str]:
    """Return, in words, the computations that keep a graph's plan from being built, for each architecture."""
    unmet: dict[str, dict[str, list[str]]] = {}
    for name, need in list_needs(path):
        for sm in sms:
            if not need.is_met(sm):
                unmet.setdefault(sm, {}).setdefault(need.what, []).append(name)
    return {
        sm: " and ".join(
            f"{what} ({names[0]}{f' and {len(names) - 1} more' if names[1:] else ''})"
            for what, names in found.items()
        )
        for sm, found in unmet.items()
    }
