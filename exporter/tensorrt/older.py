"""Rewrites graphs for TensorRT 8: opset 17 at most, with every operator that it lacks written out.

B, T and so on do not matter here: what is added works element by element, or along the last axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import BuildError

if TYPE_CHECKING:
    # Only functions import onnx: the builder's main(), which answers what is missing, loads without it.
    from onnx import ModelProto, NodeProto, TensorProto

OPSET = 17
# Operators whose newer versions took more types, or an attribute that our graphs leave alone.
WIDENED = {"Cast", "Constant", "ConstantOfShape", "Equal", "Identity", "Reshape", "Shape", "Size"}


class Rewriter:
    """Collects the nodes that replace one node."""

    def __init__(self, node: NodeProto, types: dict[str, int], constants: dict[str, TensorProto]) -> None:
        self.node = node
        self.types = types
        self.constants = constants
        self.made: list[NodeProto] = []

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node with fp32 results and return its output's name."""
        from onnx import TensorProto, helper

        name = output or f"{self.node.output[0]}/{len(self.made)}"
        self.made.append(helper.make_node(operator, inputs, [name], f"{name}/{operator}", **attributes))
        self.types.setdefault(name, attributes.get("to", TensorProto.FLOAT))
        return name

    def add_number(self, value: float) -> str:
        from onnx import TensorProto, helper

        return self.add("Constant", value=helper.make_tensor("", TensorProto.FLOAT, [], [value]))

    def cast_to_fp32(self, name: str) -> str:
        """Cast a value to fp32 and return the result's name."""
        from onnx import TensorProto

        return self.add("Cast", name, to=TensorProto.FLOAT)

    def set_result(self, name: str) -> None:
        """Set the value that the node's readers get, in their previous type."""
        output = self.node.output[0]
        self.add("Cast", name, output=output, to=self.types[output])


def rewrite_for_tensorrt_8(model: ModelProto, version: tuple[int, int]) -> dict[str, int]:
    """Rewrite a graph in place, for 8.5 (no LayerNormalization) or 8.6; return every value's ONNX type.

    The nodes that replace an operator compute in fp32.
    """
    from onnx import defs

    graph = model.graph
    types = {t.name: t.data_type for t in graph.initializer}
    types |= {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
    opset = next(entry for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    constants = {tensor.name: tensor for tensor in graph.initializer}
    constants |= {
        node.output[0]: attribute.t
        for node in graph.node
        for attribute in node.attribute
        if node.op_type == "Constant" and attribute.name == "value"
    }
    nodes: list[NodeProto] = []
    for node in graph.node:
        rewrite = REWRITES.get(node.op_type)
        if node.op_type == "LayerNormalization" and version >= (8, 6):
            rewrite = None
        if rewrite is not None:
            rewriter = Rewriter(node, types, constants)
            rewrite(rewriter)
            nodes += rewriter.made or [node]
            continue
        since = defs.get_schema(node.op_type, opset.version, node.domain).since_version
        if since > OPSET and node.op_type not in WIDENED:
            raise BuildError(
                f"ONNX node {node.name!r} ({node.op_type}) is of opset {since}; TensorRT {version[0]}."
                f"{version[1]} supports {OPSET} at most, and PlanForge cannot rewrite it"
            )
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    opset.version = min(opset.version, OPSET)
    return types


def rewrite_gelu(r: Rewriter) -> None:
    """Write out https://onnx.ai/onnx/operators/onnx__Gelu.html."""
    x = r.cast_to_fp32(r.node.input[0])
    if any(a.name == "approximate" and a.s == b"tanh" for a in r.node.attribute):
        cube = r.add("Mul", r.add("Mul", x, x), r.add("Mul", x, r.add_number(0.044715)))
        inner = r.add("Tanh", r.add("Mul", r.add("Add", x, cube), r.add_number(math.sqrt(2 / math.pi))))
    else:
        inner = r.add("Erf", r.add("Mul", x, r.add_number(math.sqrt(0.5))))
    r.set_result(r.add("Mul", r.add("Mul", x, r.add_number(0.5)), r.add("Add", inner, r.add_number(1.0))))


def rewrite_layer_norm(r: Rewriter) -> None:
    """Write out https://onnx.ai/onnx/operators/onnx__LayerNormalization.html, along the last axis."""
    attributes = {a.name: a for a in r.node.attribute}
    if "axis" in attributes and attributes["axis"].i != -1:
        raise BuildError(f"ONNX node {r.node.name!r} (LayerNormalization): TensorRT 8.5 needs axis -1")
    x, scale, *bias = (r.cast_to_fp32(name) for name in r.node.input)
    centred = r.add("Sub", x, r.add("ReduceMean", x, axes=[-1], keepdims=1))
    variance = r.add("ReduceMean", r.add("Mul", centred, centred), axes=[-1], keepdims=1)
    epsilon = attributes["epsilon"].f if "epsilon" in attributes else 1e-5
    spread = r.add("Sqrt", r.add("Add", variance, r.add_number(epsilon)))
    result = r.add("Mul", r.add("Div", centred, spread), scale)
    r.set_result(r.add("Add", result, bias[0]) if bias else result)


def rewrite_split(r: Rewriter) -> None:
    """Drop the number of parts, which older opsets take from the number of outputs."""
    for attribute in list(r.node.attribute):
        if attribute.name == "num_outputs":
            r.node.attribute.remove(attribute)


def rewrite_reduction(r: Rewriter) -> None:
    """Make the axes, an input from opset 18 on, an attribute again."""
    from onnx import helper, numpy_helper

    named = list(r.node.input[1:])
    if not any(named):  # all axes, or none with noop_with_empty_axes, which older opsets lack
        del r.node.input[1:]
        return
    axes = r.constants.get(named[0])
    if axes is None:
        raise BuildError(
            f"ONNX node {r.node.name!r} ({r.node.op_type}): its axes {named[0]!r} are not a constant, which"
            " TensorRT 8 needs"
        )
    kept = [attribute for attribute in r.node.attribute if attribute.name != "noop_with_empty_axes"]
    del r.node.attribute[:]
    r.node.attribute.extend(kept)
    del r.node.input[1:]
    r.node.attribute.append(helper.make_attribute("axes", numpy_helper.to_array(axes).tolist()))


REWRITES: dict[str, Callable[[Rewriter], None]] = {
    "Gelu": rewrite_gelu,
    "LayerNormalization": rewrite_layer_norm,
    "Split": rewrite_split,
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin"), rewrite_reduction),
}


def keep_types(trt: Any, network: Any, types: dict[str, int]) -> None:
    """Set every layer to the type that the graph gives its result, as newer versions do by themselves.

    A parser adds the layers of one node after the other; the last of them has the node's output by its name.
    """
    from onnx import TensorProto

    wanted: dict[int, Any] = {TensorProto.FLOAT: trt.DataType.FLOAT, TensorProto.FLOAT16: trt.DataType.HALF}
    for layers, name in group_layers(network, types):
        dtype = wanted.get(types[name])
        if dtype is None:
            continue
        for layer in layers:
            outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
            if outputs[0].dtype not in wanted.values() or layer.type == trt.LayerType.CONSTANT:
                continue
            layer.precision = dtype
            for index in range(len(outputs)):
                layer.set_output_type(index, dtype)


def group_layers(network: Any, types: dict[str, int]) -> Iterator[tuple[list[Any], str]]:
    """Yield the layers that stand for each node, with the name of the node's output."""
    waiting: list[Any] = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        waiting.append(layer)
        name = next((n for i in range(layer.num_outputs) if (n := layer.get_output(i).name) in types), None)
        if name is not None:
            yield waiting, name
            waiting = []
