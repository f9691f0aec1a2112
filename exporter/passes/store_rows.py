"""Stores an encoder's int8 products, which round their rows too, for ONNX Runtime: see `int8_rows`.

B batch, T tokens, K inputs, N outputs of a product
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ..number_formats import ROW_INT8
from .biases import find_bias_add, find_vector, split_bias_gelus
from .build import Builder, replace_value
from .int8_rows import Linears, RowProduct, RowRule, find_linears
from .quantize import QuantizedWeights
from .quantized_weight import WRONG_ZEROS, QuantizedWeight, StoredRows, StoredWeight
from .weights import MICROSOFT, View, add_initializer

PRODUCT = "MatMulIntegerToFloat"
OPERATORS: tuple[str, ...] = (PRODUCT,)
# What the constants of a product are called, behind its first parameter's name.
COLUMNS = ".int8.columns"
UNSMOOTHING = ".unsmoothing"
JOINED = ".biases"


def store(model: ir.Model, weights: QuantizedWeights) -> None:
    """Let those products of an encoder that have a form with rows multiply in int8."""
    if not weights.products:
        return
    split_bias_gelus(model.graph)
    op = Builder(model.graph, None, "int8")
    for linears in find_linears(model.graph):
        if linears.names in weights.products:
            op.before = linears.matmuls[0]
            replace_linears(op, linears, weights.products[linears.names])
    RemoveUnusedNodesPass()(model)
    model.graph.opset_imports[MICROSOFT] = 1


def multiply_rows(op: Builder, linears: Linears, product: RowProduct, bias: ir.Value | None) -> ir.Value:
    """Return the product (B, T, N) of the rows that linears read, and the bias (N,)."""
    name = linears.names[0]
    x = linears.read
    N, K = product.weight.codes.shape
    if product.smoothing is not None:
        x = op("Mul", x, op.add_constant(1 / product.smoothing, name + UNSMOOTHING))
    columns = add_columns(op, name + COLUMNS, product)
    scale = op.add_constant(product.weight.scale[:, 0], f"{name}{COLUMNS}.scale")
    zero = np.uint8(product.rule.zero)
    if product.rule.step is not None:
        q = op("QuantizeLinear", x, product.rule.step, zero, domain=MICROSOFT)
        inputs = [q, columns, product.rule.step, scale, zero]
        if bias is not None:
            inputs += [None, bias]
        return op(PRODUCT, *inputs, domain=MICROSOFT)
    q, steps = quantize_rows(op, x, product.rule, K)
    result = op(PRODUCT, q, columns, 1.0, scale, zero, domain=MICROSOFT)
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
    """Return a constant of the columns (K, N) for one product alone; shared columns are stored once.

    Without VNNI ONNX Runtime rewrites the columns of each product, and fails where two share a constant.
    """
    N, K = product.weight.codes.shape
    stored = op.graph.initializers.get(name)
    if stored is None or stored.const_value is None:
        return op.add_constant(np.ascontiguousarray(product.weight.codes.T), name)
    view = View(stored.const_value, 0, (K, N))
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


def read(node: ir.Node, graph: ir.Graph) -> StoredWeight | None:
    """Return the weight that a product reads, and the rounding of its rows."""
    rows, columns, step, scale, zero, zeros = (*node.inputs, None)[:6]
    codes = None if columns is None else columns.const_value
    scales = None if scale is None else scale.const_value
    if columns is None or scale is None or codes is None or scales is None:
        return None
    name = str(columns.name).partition(COLUMNS)[0]
    K, N = codes.shape.numpy()

    def read_columns(some: slice) -> QuantizedWeight:
        return QuantizedWeight(codes.numpy().T[some], scales.numpy().reshape(N, 1)[some], ROW_INT8)

    quantizer = None if rows is None else rows.producer()
    _, own_step, own_zero, *_ = (None,) * 3 if quantizer is None else (*quantizer.inputs, None, None)
    unsmoothing = graph.initializers.get(name + UNSMOOTHING)
    stored_rows = StoredRows((step, own_step), (zero, own_zero), unsmoothing)
    constant = None if zeros is None else ir.convenience.get_const_tensor(zeros)
    is_middle = zeros is None or (constant is not None and not constant.numpy().any())
    faults = () if is_middle or zeros is None else (WRONG_ZEROS.format(zeros.name),)
    biases = graph.initializers.get(name + JOINED)
    return StoredWeight(
        node, (name,), ROW_INT8, columns, scale, (N, K), read_columns, faults, rows=stored_rows, biases=biases
    )
