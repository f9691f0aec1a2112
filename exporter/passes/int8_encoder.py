"""Puts the int8 products of `int8_rows` into an encoder's graph.

B batch, T tokens, K inputs, N outputs of a product
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .int8_rows import RowProduct, RowRule
from .weights import MICROSOFT, View, Weight, add_initializer, find_bias_add, find_vector, find_weight

# What the constants of a product are called, behind its first parameter's name.
COLUMNS = ".int8.columns"
UNSMOOTHING = ".unsmoothing"


@dataclass(frozen=True)
class Linears:
    """The MatMuls that multiply one value (B, T, K) by constants, such as query, key and value."""

    read: ir.Value
    matmuls: tuple[ir.Node, ...]
    weights: tuple[Weight, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names."""
        return tuple(weight.name for weight in self.weights)

    def join_weights(self) -> npt.NDArray[np.float32]:
        """Return all columns (K, N), float32."""
        return np.concatenate([weight.array().T for weight in self.weights], axis=1)


def find_linears(graph: ir.Graph) -> list[Linears]:
    """Return what `QuantizeEncoder` replaces. Rows that are not tokens (a pooler's) are too few to matter."""
    found: dict[ir.Value, list[tuple[ir.Node, Weight]]] = {}
    for node in graph:
        read = node.inputs[0] if node.op_type == "MatMul" else None
        weight = find_weight(node)
        if weight is not None and read is not None and read.shape is not None and len(read.shape) == 3:
            found.setdefault(read, []).append((node, weight))
    return [
        Linears(read, tuple(node for node, _ in both), tuple(weight for _, weight in both))
        for read, both in found.items()
    ]


@dataclass
class QuantizeEncoder(ir.passes.InPlacePass):
    """Makes an encoder's products int8."""

    products: Mapping[tuple[str, ...], RowProduct]  # the int8 products, by the parameters' names

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self.graph = model.graph
        found = [linears for linears in find_linears(model.graph) if linears.names in self.products]
        for linears in found:
            self.before = linears.matmuls[0]
            self.replace(linears, self.products[linears.names])
        RemoveUnusedNodesPass()(model)
        model.graph.opset_imports[MICROSOFT] = 1
        return ir.passes.PassResult(model, modified=bool(found))

    def replace(self, linears: Linears, product: RowProduct) -> None:
        name = linears.names[0]
        x = linears.read
        K, N = product.weight.shape
        if product.smoothing is not None:
            x = self.add("Mul", [x, self.add_constant(name + UNSMOOTHING, 1 / product.smoothing)])
        q, steps = self.quantize_rows(x, product.rule, K)
        columns = self.add_columns(name + COLUMNS, product)
        one = self.add_constant("int8.one", np.array(1, np.float32))
        scale = self.add_constant(f"{name}{COLUMNS}.scale", product.scale)
        zero = self.add_zero(product.rule)
        result = self.add("MatMulIntegerToFloat", [q, columns, one, scale, zero], domain=MICROSOFT)
        leading = self.add("Shape", [linears.read], start=0, end=2)
        shape = self.add("Concat", [leading, self.add_constant(f"int8.width.{N}", np.array([N]))], axis=0)
        y = self.add("Mul", [self.add("Reshape", [result, shape]), steps])
        self.connect(linears, y)

    def add_columns(self, name: str, product: RowProduct) -> ir.Value:
        """Return a constant of columns (K, N) for one product alone; what several multiply by is stored once.

        Without VNNI ONNX Runtime rewrites the columns of each product, and fails where two share a constant.
        """
        stored = self.graph.initializers.get(name)
        if stored is None or stored.const_value is None:
            return self.add_constant(name, product.weight)
        view = View(stored.const_value, 0, product.weight.shape)
        return add_initializer(self.graph, f"{name}.{len(self.graph.initializers)}", view)

    def quantize_rows(self, x: ir.Value, rule: RowRule, K: int) -> tuple[ir.Value, ir.Value]:
        """Return q (B * T, K) uint8 and the steps (B, T, 1) of x (B, T, K)."""
        last = self.add_constant("int8.last", np.array([-1]))
        largest = self.add("ReduceMax", [self.add("Abs", [x]) if rule.absolute else x, last], keepdims=1)
        floor = self.add_constant(f"int8.floor.{rule.floor:.6g}", np.array(rule.floor, np.float32))
        share = self.add_constant(f"int8.share.{rule.top}", np.array(1 / rule.top, np.float32))
        steps = self.add("Mul", [self.add("Max", [largest, floor]), share])
        flat = self.add("Reshape", [steps, last])
        zeros = self.add("Expand", [self.add_zero(rule), self.add("Shape", [flat])])
        rows = self.add("Reshape", [x, self.add_constant(f"int8.rows.{K}", np.array([-1, K]))])
        return self.add("QuantizeLinear", [rows, flat, zeros], axis=0), steps

    def add_zero(self, rule: RowRule) -> ir.Value:
        return self.add_constant(f"int8.zero.{rule.zero}", np.array(rule.zero, np.uint8))

    def connect(self, linears: Linears, y: ir.Value) -> None:
        """Give y (B, T, N) to the readers of the old products; several biases become one."""
        name = linears.names[0]
        old = [node.outputs[0] for node in linears.matmuls]
        parts: Sequence[ir.Value] = [y]
        if len(old) > 1:
            biases = [bias for bias in map(find_bias_add, linears.matmuls) if bias is not None]
            if len(biases) == len(old):
                vectors = [find_vector(bias) for bias in biases]
                joined = np.concatenate([v.const_value.numpy() for v in vectors if v and v.const_value])
                y = self.add("Add", [y, self.add_constant(f"{name}.biases", joined)])
                old = [bias.outputs[0] for bias in biases]
            widths = self.add_constant(f"{name}.widths", np.array([w.rows for w in linears.weights]))
            parts = self.add_node("Split", [y, widths], len(old), axis=-1).outputs
        for before, after in zip(old, parts, strict=True):
            after.type = before.type
            after.shape = before.shape
            ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
            after.name = before.name
            before.name = None

    def add_constant(self, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
        return add_initializer(self.graph, name, ir.tensor(array, name=name))

    def add(self, operator: str, inputs: Sequence[ir.Value], domain: str = "", **attributes: int) -> ir.Value:
        """Add a node with one result, and return the result."""
        return self.add_node(operator, inputs, 1, domain, **attributes).outputs[0]

    def add_node(
        self, operator: str, inputs: Sequence[ir.Value], outputs: int, domain: str = "", **attributes: int
    ) -> ir.Node:
        node = ir.node(operator, inputs, attributes or None, domain=domain, num_outputs=outputs)
        node.name = f"int8_{operator}_{len(self.graph)}"
        for number, value in enumerate(node.outputs):
            value.name = f"{node.name}_{number}"
        self.graph.insert_before(self.before, node)
        return node
