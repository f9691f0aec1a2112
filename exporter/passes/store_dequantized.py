"""Stores quantized weights in ONNX's own operators, for plans: MatMul reads a DequantizeLinear.

TensorRT multiplies by such a weight without writing it out in fp16. In 8 bits it has a scale for each
column of the weight as it is stored, in 4 bits one for each block of rows. NVFP4's scales are in fp8: they
are dequantized as well, by their unit. `static_rows` has products that read rows in 8 bits too.

N rows of a weight (its outputs), K columns (its inputs), b columns in a block
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ..number_formats import FP8, PLAN_FLOATS, PLAN_INTEGERS, find_unit
from .quantize import QuantizedWeights, find_products
from .quantized_weight import (
    WEIGHT,
    WRONG_ZEROS,
    Array,
    QuantizedWeight,
    StoredRows,
    StoredWeight,
    read_constants,
)
from .static_rows import quantize_rows, read_rows
from .weights import add_initializer

OPERATOR = "DequantizeLinear"
OPERATORS: tuple[str, ...] = (OPERATOR,)
ROUNDED = ".rounded"  # in the name of a weight whose product rounds its rows too
ROWS = 0  # the axis of K in a weight that is stored (K, N)
FORMATS = {format.element_type: format for format in (*PLAN_INTEGERS.values(), *PLAN_FLOATS.values())}


def store(model: ir.Model, weights: QuantizedWeights) -> None:
    """Let every product by a constant read a weight that is dequantized in the graph."""
    graph = model.graph
    rounded = quantize_rows(graph, weights.products)
    made: dict[tuple[str, bool], ir.Value] = {}  # by the name, and by whether rows are rounded too
    for node, weight in find_products(graph):
        own = rounded.get(node)
        if own is None and weights.is_float(weight):
            continue
        key = (weight.name, own is not None)
        if key not in made:
            chosen = weights.choose(weight) if own is None else own
            made[key] = dequantize(graph, node, weight.name, chosen, ROUNDED if own is not None else "")
            # TensorRT before 10.9 takes none so new as int4's.
            graph.opset_imports[""] = max(graph.opset_imports[""], chosen.format.opset)
        node.replace_input_with(1, made[key])
        if node.op_type == "Gemm":
            node.attributes["transB"] = ir.AttrInt64("transB", 0)
    RemoveUnusedNodesPass()(model)


def dequantize(
    graph: ir.Graph, before: ir.Node, name: str, weight: QuantizedWeight, kind: str = ""
) -> ir.Value:
    """Add the node that gives a weight (K, N) of codes and scales; `kind` is a part of their names."""
    stem = f"{name}{kind}.{weight.format.name}.columns"
    N, K = weight.codes.shape
    dtype = ir.DataType(weight.format.element_type)
    shape = ir.Shape((K, N))

    def read_codes() -> ir.TensorProtocol:  # only while they are written: else all are there twice
        codes = np.ascontiguousarray(weight.codes.T)
        return ir.Tensor(codes.astype(dtype.numpy()), dtype=dtype, shape=shape)

    codes = add_initializer(graph, stem, ir.LazyTensor(read_codes, dtype=dtype, shape=shape, name=stem))
    one_scale = weight.scale.shape[1] == 1
    scale = weight.scale[:, 0] if one_scale else np.ascontiguousarray(weight.scale.T)
    attributes = {"axis": 1} if one_scale else {"axis": ROWS, "block_size": weight.size}
    if weight.format.shares_unit:
        scales = dequantize_scales(graph, before, stem, scale)
    else:
        scales = add_initializer(graph, f"{stem}.scale", ir.tensor(scale, name=f"{stem}.scale"))
    result = add_node(graph, before, f"{name}{kind}/dequantize", [codes, scales], attributes)
    result.name = f"{name}{kind}.dequantized"
    result.shape = shape
    node = result.producer()
    assert node is not None
    node.metadata_props[WEIGHT] = name
    return result


def dequantize_scales(graph: ir.Graph, before: ir.Node, stem: str, scale: Array) -> ir.Value:
    """Add the node that gives scales (K / b, N), which are fp8 numbers times their unit."""
    unit = find_unit(scale)
    codes = FP8.round(scale / np.float32(unit))
    inputs = [
        add_initializer(graph, f"{stem}.scale", ir.tensor(codes, name=f"{stem}.scale")),
        add_initializer(graph, f"{stem}.unit", ir.tensor(np.float32(unit), name=f"{stem}.unit")),
    ]
    result = add_node(graph, before, f"{stem}/scale", inputs, {})
    result.name = f"{stem}.scale.dequantized"
    result.shape = ir.Shape(scale.shape)
    return result


def add_node(
    graph: ir.Graph, before: ir.Node, name: str, inputs: Sequence[ir.Value], attributes: Mapping[str, int]
) -> ir.Value:
    """Add a node of the module that another belongs to, and return its result in fp32."""
    node = ir.node(OPERATOR, inputs, attributes, name=name)
    node.metadata_props.update(before.metadata_props)
    graph.insert_before(before, node)
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    return node.outputs[0]


def read(node: ir.Node, graph: ir.Graph) -> StoredWeight | None:
    """Return the weight that a node dequantizes."""
    first, second, zeros = (*node.inputs, None, None)[:3]
    unit: ir.Value | None = None
    producer = None if second is None else second.producer()
    if producer is not None and producer.op_type == OPERATOR and len(producer.inputs) == 2:
        second, unit = producer.inputs
    if (found := read_constants(node, first, second)) is None:
        return None
    codes, packed, scale, scales = found
    format = None if packed.dtype is None else FORMATS.get(packed.dtype)
    if format is None or format.shares_unit != (unit is not None and unit.const_value is not None):
        return None
    K, N = packed.shape.numpy()
    blocks = 1 if len(scales.shape) == 1 else scales.shape.numpy()[0]

    def read_part(rows: slice) -> QuantizedWeight:
        own = scales.numpy().astype(np.float32).reshape(blocks, N).T[rows]
        if unit is not None and unit.const_value is not None:
            own = own * np.float32(unit.const_value.numpy())
        codes = packed.numpy().T[rows].astype(format.dtype)
        return QuantizedWeight(codes, np.ascontiguousarray(own), format)

    faults = list(find_faults(node, K, blocks))
    if zeros is not None:
        faults.append(WRONG_ZEROS.format(zeros.name))
    names = (node.metadata_props[WEIGHT],)
    faults += find_unlike_readers(node, first)
    products = list_products(node)
    rounded = read_rows(products[0]) if products else None
    shape = (N, K)
    return StoredWeight(
        node, names, format, codes, scale, shape, read_part, tuple(faults), rows=rounded, unit=unit
    )


def list_products(node: ir.Node) -> list[ir.Node]:
    """Return the products that read a weight."""
    return [use.node for use in node.outputs[0].uses() if use.node.op_type in ("MatMul", "Gemm")]


def find_unlike_readers(node: ir.Node, codes: ir.Value | None) -> list[str]:
    """Return in words which readers of a weight no export writes: `read` takes the first for all.

    All its products round their rows alike, or none does, and its codes are read to dequantize them alone.
    """
    faults = []
    products = list_products(node)
    for other in products[1:]:
        if not rounds_alike(read_rows(products[0]), read_rows(other)):
            faults.append(
                f"is read by {products[0].name!r} and {other.name!r}, which round their rows differently"
            )
    for use in () if codes is None else codes.uses():
        if use.node.op_type != OPERATOR:
            faults.append(f"has codes that {use.node.name!r} ({use.node.op_type}) reads as they are")
    return faults


def rounds_alike(one: StoredRows | None, other: StoredRows | None) -> bool:
    """Tell whether rows are rounded by the same numbers, which fp16 and fp32 nodes read apart."""
    if one is None or other is None:
        return one is other
    pairs = zip(
        (*one.steps, *one.zeros, one.unsmoothing),
        (*other.steps, *other.zeros, other.unsmoothing),
        strict=True,
    )
    return all(mine is theirs or holds_same(mine, theirs) for mine, theirs in pairs)


def holds_same(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Tell whether two constants have the same numbers, in whatever type."""
    if one is None or other is None or one.const_value is None or other.const_value is None:
        return False
    mine = one.const_value.numpy().astype(np.float32)
    return np.array_equal(mine, other.const_value.numpy().astype(np.float32))


def find_faults(node: ir.Node, K: int, blocks: int) -> list[str]:
    """Return in words which attributes would let an engine take other scales than `read` does."""
    axis = node.attributes.get_int("axis", 1)
    size = node.attributes.get_int("block_size", 0)
    expected = (1, 0) if blocks == 1 else (ROWS, K // blocks)
    if (axis, size) == expected:
        return []
    return [f"has axis {axis} and block_size {size}, not {expected[0]} and {expected[1]}"]
