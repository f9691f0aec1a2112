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

from .build import Builder
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
    """Return what can become int8. Rows that are not tokens (a pooler's) are too few to matter."""
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


def quantize_encoder(model: ir.Model, products: Mapping[tuple[str, ...], RowProduct]) -> None:
    """Make an encoder's products int8, those whose parameters' names `products` has."""
    op = Builder(model.graph, None, "int8")
    for linears in find_linears(model.graph):
        if linears.names in products:
            op.before = linears.matmuls[0]
            replace_linears(op, linears, multiply_rows(op, linears, products[linears.names]))
    RemoveUnusedNodesPass()(model)
    model.graph.opset_imports[MICROSOFT] = 1


def multiply_rows(op: Builder, linears: Linears, product: RowProduct) -> ir.Value:
    """Return the product (B, T, N) of what linears read, without their biases."""
    name = linears.names[0]
    x = linears.read
    K, N = product.weight.shape
    if product.smoothing is not None:
        x = op("Mul", x, op.add_constant(1 / product.smoothing, name + UNSMOOTHING))
    q, steps = quantize_rows(op, x, product.rule, K)
    columns = add_columns(op, name + COLUMNS, product)
    scale = op.add_constant(product.scale, f"{name}{COLUMNS}.scale")
    zero = np.uint8(product.rule.zero)
    result = op("MatMulIntegerToFloat", q, columns, 1.0, scale, zero, domain=MICROSOFT)
    shape = op("Concat", op("Shape", linears.read, start=0, end=2), [N], axis=0)
    return op("Mul", op("Reshape", result, shape), steps)


def quantize_rows(op: Builder, x: ir.Value, rule: RowRule, K: int) -> tuple[ir.Value, ir.Value]:
    """Return q (B * T, K) uint8 and the steps (B, T, 1) of x (B, T, K)."""
    largest = op("ReduceMax", op("Abs", x) if rule.absolute else x, [-1], keepdims=1)
    steps = op("Mul", op("Max", largest, rule.floor), 1 / rule.top)
    flat = op("Reshape", steps, [-1])
    zeros = op("Expand", np.uint8(rule.zero), op("Shape", flat))
    return op("QuantizeLinear", op("Reshape", x, [-1, K]), flat, zeros, axis=0), steps


def add_columns(op: Builder, name: str, product: RowProduct) -> ir.Value:
    """Return a constant of columns (K, N) for one product alone; what several multiply by is stored once.

    Without VNNI ONNX Runtime rewrites the columns of each product, and fails where two share a constant.
    """
    stored = op.graph.initializers.get(name)
    if stored is None or stored.const_value is None:
        return op.add_constant(product.weight, name)
    view = View(stored.const_value, 0, product.weight.shape)
    return add_initializer(op.graph, f"{name}.{len(op.graph.initializers)}", view)


def replace_linears(op: Builder, linears: Linears, y: ir.Value) -> None:
    """Give y (B, T, N) to the readers of the old products; several biases become one."""
    name = linears.names[0]
    old = [node.outputs[0] for node in linears.matmuls]
    parts: Sequence[ir.Value] = [y]
    if len(old) > 1:
        biases = [bias for bias in map(find_bias_add, linears.matmuls) if bias is not None]
        if len(biases) == len(old):
            vectors = [find_vector(bias) for bias in biases]
            joined = np.concatenate([v.const_value.numpy() for v in vectors if v and v.const_value])
            y = op("Add", y, op.add_constant(joined, f"{name}.biases"))
            old = [bias.outputs[0] for bias in biases]
        widths = [weight.rows for weight in linears.weights]
        parts = op.add("Split", y, widths, results=len(old), axis=-1).outputs
    for before, after in zip(old, parts, strict=True):
        after.type = before.type
        after.shape = before.shape
        ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
        after.name = before.name
        before.name = None
