"""Adds nodes to a graph, and replaces results of others by theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from .weights import add_initializer

# Operators that are used here, by the input that their results have the type of.
TYPED_BY_FIRST = (
    "Abs", "Add", "Attention", "Concat", "CumSum", "DepthToSpace", "Div", "Expand", "Gather", "Gelu", "Gemm",
    "GroupQueryAttention", "MatMul", "Max", "Mod", "Mul", "Neg", "Pad", "Range", "ReduceL2", "ReduceMax",
    "ReduceMin", "ReduceSum", "Reshape", "Slice", "Softmax", "SpaceToDepth", "Split", "Squeeze", "Sub",
    "Transpose", "Unsqueeze",
)  # fmt: skip
TYPED_BY = {
    **dict.fromkeys(TYPED_BY_FIRST, 0),
    "DequantizeLinear": 1,
    "MatMulIntegerToFloat": 2,
    "QuantizeLinear": 2,
    "Where": 1,
}


class Builder:
    """Adds nodes before one of a graph, or to its end; they are named after `name`.

    `metadata` is what they get, such as the module of a node that they replace.
    """

    def __init__(self, graph: ir.Graph, before: ir.Node | None, name: str) -> None:
        self.graph = graph
        self.before = before
        self.name = name
        self.count = 0
        self.metadata: Mapping[str, str] = {}
        self.taken = {node.name for node in graph}  # names; len(graph) tells none apart once a node is gone

    def __call__(self, operator: str, *inputs: Any, **options: Any) -> ir.Value:
        """Add a node as `add` does, and return its first result."""
        return self.add(operator, *inputs, **options).outputs[0]

    def add(
        self,
        operator: str,
        *inputs: Any,
        domain: str = "",
        results: int = 1,
        shape: Sequence[int | str] | None = None,
        **attributes: Any,
    ) -> ir.Node:
        """Add a node, whose results have a shape if it is given.

        An input is a value, None, or a number or an array, which becomes a constant: a Python number int64
        or float32.
        """
        values = [x if x is None or isinstance(x, ir.Value) else self.add_constant(x) for x in inputs]
        name = self.make_name(operator)
        node = ir.node(operator, values, attributes, domain=domain, num_outputs=results, name=name)
        node.metadata_props.update(self.metadata)
        for number, result in enumerate(node.outputs):
            result.type = infer_type(node)
            result.shape = None if shape is None else ir.Shape(shape)
            result.name = f"{name}.{number}"
        if self.before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.before, node)
        return node

    def make_name(self, operator: str) -> str:
        """Return a node's name that the graph does not have."""
        while True:
            name = f"{self.name}_{operator.lower()}_{self.count}"
            self.count += 1
            if name not in self.taken:
                return name

    def add_constant(self, number: npt.ArrayLike, name: str = "") -> ir.Value:
        """Return a constant, which is in the graph once; a large one needs a name."""
        array = np.asarray(number)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        name = name or f"constant/{array.dtype}/{array.tolist()}"
        return add_initializer(self.graph, name, ir.tensor(array, name=name))


def infer_type(node: ir.Node) -> ir.TypeProtocol | None:
    """Return the type of a node's results; None for an operator that is not in the table here."""
    if node.op_type == "Shape":
        return ir.TensorType(ir.DataType.INT64)
    if node.op_type == "Cast":
        return ir.TensorType(ir.DataType(node.attributes["to"].as_int()))
    if node.op_type in ("And", "GreaterOrEqual", "Less"):
        return ir.TensorType(ir.DataType.BOOL)
    if node.op_type not in TYPED_BY:
        return None
    given = node.inputs[TYPED_BY[node.op_type]]
    return None if given is None else given.type


def replace_value(before: ir.Value, after: ir.Value) -> None:
    """Let all readers of a value, and the graph's outputs, use another value, under the same name."""
    after.type = before.type
    after.shape = before.shape
    ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
    after.name = before.name
    before.name = None
