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

from .biases import find_bias_add, find_vector, split_bias_gelus
from .build import Builder, replace_value
from .int8_rows import RowProduct, RowRule
from .neighbours import find_below
from .weights import MICROSOFT, View, Weight, add_initializer, find_weight

# What the constants of a product are called, behind its first parameter's name.
COLUMNS = ".int8.columns"
UNSMOOTHING = ".unsmoothing"
JOINED = ".biases"


@dataclass(frozen=True)
class Linears:
    """The MatMuls that multiply one value (B, T, K) by constants, such as query, key and value."""

    matmuls: tuple[ir.Node, ...]
    weights: tuple[Weight, ...]

    @property
    def read(self) -> ir.Value:
        """The value that is multiplied now: what computed it may have been replaced since they were found."""
        value = self.matmuls[0].inputs[0]
        assert value is not None
        return value

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names."""
        return tuple(weight.name for weight in self.weights)

    @property
    def width(self) -> int:
        """N, of all results side by side."""
        return sum(weight.rows for weight in self.weights)

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
        Linears(tuple(node for node, _ in both), tuple(weight for _, weight in both))
        for both in found.values()
    ]


def find_attention_products(graph: ir.Graph) -> set[ir.Node]:
    """Return the products by constants that attention's queries, keys and values come from."""
    contexts = [
        context
        for node in graph
        if node.op_type == "Softmax"
        for context in find_below(node.outputs[0], "MatMul")
        if find_weight(context) is None
    ]
    found = set()
    seen = set()
    waiting: list[ir.Node | None] = [*contexts]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if find_weight(node) is not None:
            found.add(node)
        else:
            waiting += [value.producer() for value in node.inputs if value is not None]
    return found


def quantize_encoder(model: ir.Model, products: Mapping[tuple[str, ...], RowProduct]) -> None:
    """Make an encoder's products int8, those whose parameters' names `products` has."""
    split_bias_gelus(model.graph)
    op = Builder(model.graph, None, "int8")
    for linears in find_linears(model.graph):
        if linears.names in products:
            op.before = linears.matmuls[0]
            replace_linears(op, linears, products[linears.names])
    RemoveUnusedNodesPass()(model)
    model.graph.opset_imports[MICROSOFT] = 1


def multiply_rows(op: Builder, linears: Linears, product: RowProduct, bias: ir.Value | None) -> ir.Value:
    """Return the product (B, T, N) of what linears read, and the bias (N,)."""
    name = linears.names[0]
    x = linears.read
    K, N = product.weight.shape
    if product.smoothing is not None:
        x = op("Mul", x, op.add_constant(1 / product.smoothing, name + UNSMOOTHING))
    columns = add_columns(op, name + COLUMNS, product)
    scale = op.add_constant(product.scale, f"{name}{COLUMNS}.scale")
    zero = np.uint8(product.rule.zero)
    if product.rule.step is not None:
        q = op("QuantizeLinear", x, product.rule.step, zero, domain=MICROSOFT)
        inputs = [q, columns, product.rule.step, scale, zero]
        if bias is not None:
            inputs += [None, bias]
        return op("MatMulIntegerToFloat", *inputs, domain=MICROSOFT)
    q, steps = quantize_rows(op, x, product.rule, K)
    result = op("MatMulIntegerToFloat", q, columns, 1.0, scale, zero, domain=MICROSOFT)
    shape = op("Concat", op("Shape", linears.read, start=0, end=2), [N], axis=0)
    y = op("Mul", op("Reshape", result, shape), steps)
    return y if bias is None else op("Add", y, bias)


def quantize_rows(op: Builder, x: ir.Value, rule: RowRule, K: int) -> tuple[ir.Value, ir.Value]:
    """Return q (B * T, K) uint8 and the steps (B, T, 1) of x (B, T, K)."""
    largest = op("ReduceMax", x, [-1], keepdims=1)
    bounds = [largest, rule.floor]
    if rule.absolute:  # two searches take half the time of one in the magnitudes, which have to be written
        bounds.append(op("Neg", op("ReduceMin", x, [-1], keepdims=1)))
    steps = op("Mul", op("Max", *bounds), 1 / rule.top)
    flat = op("Reshape", steps, [-1])
    zeros = op("Expand", np.uint8(rule.zero), op("Shape", flat))
    return op("QuantizeLinear", op("Reshape", x, [-1, K]), flat, zeros, axis=0, domain=MICROSOFT), steps


def add_columns(op: Builder, name: str, product: RowProduct) -> ir.Value:
    """Return a constant of columns (K, N) for one product alone; what several multiply by is stored once.

    Without VNNI ONNX Runtime rewrites the columns of each product, and fails where two share a constant.
    """
    stored = op.graph.initializers.get(name)
    if stored is None or stored.const_value is None:
        return op.add_constant(product.weight, name)
    view = View(stored.const_value, 0, product.weight.shape)
    return add_initializer(op.graph, f"{name}.{len(op.graph.initializers)}", view)


def replace_linears(op: Builder, linears: Linears, product: RowProduct) -> None:
    """Give the int8 product to the readers of the old ones, with their biases if all have one."""
    old = [node.outputs[0] for node in linears.matmuls]
    adds = [add for add in map(find_bias_add, linears.matmuls) if add is not None]
    bias = None
    if len(adds) == len(old):
        vectors = [find_vector(add) for add in adds]
        joined = np.concatenate([v.const_value.numpy() for v in vectors if v and v.const_value])
        bias = op.add_constant(joined, f"{linears.names[0]}{JOINED}") if len(old) > 1 else vectors[0]
        old = [add.outputs[0] for add in adds]
    parts: Sequence[ir.Value] = [multiply_rows(op, linears, product, bias)]
    if len(old) > 1:
        widths = [weight.rows for weight in linears.weights]
        parts = op.add("Split", parts[0], widths, results=len(old), axis=-1).outputs
    for before, after in zip(old, parts, strict=True):
        replace_value(before, after)
