"""Products whose rows and weights are both in 8 bits, as plans multiply them: how to choose and store them.

For x of M rows (tokens) and K columns and a weight W (K, N), with one step for all rows and no zero points:

    x' = x / s                      only where smoothing pays; s (K,) moves into W' = s W
    y  = dequantize(quantize(x' / step)) @ dequantize(W'q)

TensorRT multiplies the codes where a DequantizeLinear stands before both factors of a MatMul.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..number_formats import NumberFormat
from .build import Builder
from .int8_rows import (
    ROW_FORMATS,
    Linears,
    RowProduct,
    StaticRule,
    compute_column_scales,
    compute_smoothing,
    divide,
    find_linears,
    round_product,
)
from .quantized_weight import QuantizedWeight, StoredRows
from .weights import add_initializer

Array = npt.NDArray[np.float32]

ALPHAS = (0.4, 0.5, 0.6, 0.7, 0.8)  # of a smoothing, see `int8_rows.ALPHAS`
CLIPS = (1.25, 1.0, 0.8)  # of a step: what is beyond the largest value of real text, or is clipped
WORTH = 0.8  # smoothing costs a product over x: only where it leaves less than this share of the error
UNSMOOTHING = ".unsmoothing"  # what a smoothing's reciprocal is called, behind the first parameter's name
SMALLEST_FACTOR = 2.0**-14  # of a smoothing, in fp16
LARGEST_FACTOR = 2.0**14


def choose_static_product(x: Array, weight: Array, format: NumberFormat) -> RowProduct:
    """Return the form of `weight` (K, N) in 8 bits whose products with rows like x (M, K) are closest.

    A smoothing and a step are fitted on the first half of the rows and judged on the other: on other texts.
    Each row counts as much as any other: those of outliers would decide alone. Weights are rounded to the
    nearest.
    """
    fit, held = np.array_split(x, 2)
    exact = held @ weight
    power = np.maximum(np.square(exact).sum(axis=1), np.finfo(np.float32).tiny)

    def measure_error(alpha: float | None, clip: float) -> float:
        """Return the share of a row's squares that a smoothing and a clip lose, in the mean."""
        smoothing = None if alpha is None else make_smoothing(fit, weight, alpha)
        scaled = weight if smoothing is None else weight * smoothing[:, None]
        scale = compute_column_scales(scaled, format)
        near = format.round(scaled / scale).astype(np.float32) * scale
        rounded = StaticRule.of(divide(fit, smoothing), format, clip).round_rows(divide(held, smoothing))
        return float((np.square(rounded @ near - exact).sum(axis=1) / power).mean())

    plain = measure_error(None, 1.0)
    error, alpha = min((measure_error(alpha, 1.0), alpha) for alpha in ALPHAS)
    chosen = alpha if error < plain * WORTH else None
    error, clip = min((measure_error(chosen, clip), clip) for clip in CLIPS)
    smoothing = None if chosen is None else make_smoothing(x, weight, chosen)
    rule = StaticRule.of(divide(x, smoothing), format, clip)
    product = round_product(weight, smoothing, rule)
    return RowProduct(product.smoothing, rule, product.weight, error)


def make_smoothing(x: Array, weight: Array, alpha: float) -> Array:
    """Return the divisors (K,) of rows like x (M, K); fp16 holds their reciprocals, which a graph stores."""
    factors = np.clip(1 / compute_smoothing(x, weight, alpha), SMALLEST_FACTOR, LARGEST_FACTOR)
    return np.asarray(1 / factors.astype(np.float16).astype(np.float32))


def split_product(product: RowProduct, linears: Linears) -> dict[tuple[str, ...], RowProduct]:
    """Return the product of each weight by itself; the smoothing and the step of the rows are shared."""
    parts: dict[tuple[str, ...], RowProduct] = {}
    first = 0
    for weight in linears.weights:
        rows = slice(first, first + weight.rows)
        first += weight.rows
        own = QuantizedWeight(product.weight.codes[rows], product.weight.scale[rows], product.weight.format)
        parts[weight.name,] = RowProduct(
            product.smoothing, product.rule, own, product.error, together=linears.names
        )
    return parts


def quantize_rows(
    graph: ir.Graph, products: Mapping[tuple[str, ...], RowProduct]
) -> dict[ir.Node, QuantizedWeight]:
    """Let products read rows in 8 bits; return the nodes with the weights that belong to them."""
    found: dict[ir.Node, QuantizedWeight] = {}
    for linears in find_linears(graph):
        first = products.get((linears.names[0],))
        if first is None or first.together != linears.names or not isinstance(first.rule, StaticRule):
            continue
        rows = round_value(graph, linears, first, first.rule)
        for node, name in zip(linears.matmuls, linears.names, strict=True):
            node.replace_input_with(0, rows)
            found[node] = products[name,].weight
    return found


def round_value(graph: ir.Graph, linears: Linears, product: RowProduct, rule: StaticRule) -> ir.Value:
    """Add the nodes that smooth and round what linears read, and return the rounded value."""
    before = linears.matmuls[0]
    name = linears.names[0]
    read = linears.read
    op = Builder(graph, before, f"{before.name}/rows")
    x = read
    if product.smoothing is not None:
        x = op("Mul", x, op.add_constant(1 / product.smoothing, name + UNSMOOTHING))
    codes = ir.DataType(ROW_FORMATS[rule.format].element_type)
    zeros = ir.tensor(np.zeros((), codes.numpy()), dtype=codes, name=f"zero.{rule.format}")
    zero = add_initializer(graph, str(zeros.name), zeros)
    step = op.add_constant(np.float32(rule.step), f"{name}.rows.step")
    rounded = op("DequantizeLinear", op("QuantizeLinear", x, step, zero), step, zero)
    node = rounded.producer()
    while node is not None and node is not read.producer():
        node.metadata_props.update(before.metadata_props)
        node.outputs[0].shape = read.shape
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    return rounded


def read_rows(product: ir.Node) -> StoredRows | None:
    """Return how a product's rows are rounded; None where they are not."""
    value = product.inputs[0]
    dequantize = None if value is None else value.producer()
    if dequantize is None or dequantize.op_type != "DequantizeLinear" or dequantize.inputs[0] is None:
        return None
    quantize = dequantize.inputs[0].producer()
    if quantize is None or quantize.op_type != "QuantizeLinear":
        return None
    _, own_step, own_zero, *_ = (*quantize.inputs, None, None)
    _, step, zero, *_ = (*dequantize.inputs, None, None)
    return StoredRows((step, own_step), (zero, own_zero), find_unsmoothing(quantize))


def find_unsmoothing(quantize: ir.Node) -> ir.Value | None:
    """Return what the rows that a node quantizes are multiplied by first, if that was added for it."""
    value = quantize.inputs[0]
    smooth = None if value is None else value.producer()
    if smooth is None or smooth.op_type != "Mul":
        return None
    return next((v for v in smooth.inputs if v is not None and UNSMOOTHING in str(v.name)), None)


def find_source(value: ir.Value) -> ir.Value:
    """Return what a product's rounded rows were before they were smoothed; other values as they are."""
    dequantize = value.producer()
    readers = [] if dequantize is None else [use.node for use in value.uses()]
    rows = read_rows(readers[0]) if readers and readers[0].op_type == "MatMul" else None
    if rows is None or dequantize is None or dequantize.inputs[0] is None:
        return value
    quantize = dequantize.inputs[0].producer()
    source = None if quantize is None else quantize.inputs[0]
    if source is not None and rows.unsmoothing is not None and (smooth := source.producer()) is not None:
        source = smooth.inputs[0]
    return value if source is None else source


def list_rounding(product: ir.Node) -> list[ir.Node]:
    """Return the nodes that smooth, quantize and dequantize what a product reads."""
    value = product.inputs[0]
    if value is None or read_rows(product) is None:
        return []
    nodes: list[ir.Node] = []
    source = find_source(value)
    while value is not None and value is not source and (node := value.producer()) is not None:
        nodes.append(node)
        value = node.inputs[0]
    return nodes
