"""Stores weights in int8 and int4 in ONNX's own operators, for plans: MatMul reads a DequantizeLinear.

TensorRT multiplies by such a weight without writing it out in fp16. int8 has a scale for each column of the
weight as it is stored, int4 one for each block of rows; both are symmetric.

N rows of a weight (its outputs), K columns (its inputs), b columns in a block
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .quantize import QuantizedWeights, find_products
from .quantized_weight import WEIGHT, WRONG_ZEROS, QuantizedWeight, StoredWeight, read_constants
from .weights import add_initializer

OPERATOR = "DequantizeLinear"
OPERATORS: tuple[str, ...] = (OPERATOR,)
OPSET = 21  # the first that has int4; TensorRT before 10.9 takes none so new
TYPES = {8: ir.DataType.INT8, 4: ir.DataType.INT4}
ROWS = 0  # the axis of K in a weight that is stored (K, N)


def store(model: ir.Model, weights: QuantizedWeights) -> None:
    """Let every product by a constant read a weight that is dequantized in the graph."""
    graph = model.graph
    made: dict[str, ir.Value] = {}
    for node, weight in find_products(graph):
        if weight.name not in made:
            made[weight.name] = dequantize(graph, node, weight.name, weights.choose(weight))
        node.replace_input_with(1, made[weight.name])
        if node.op_type == "Gemm":
            node.attributes["transB"] = ir.AttrInt64("transB", 0)
    RemoveUnusedNodesPass()(model)
    if any(v.dtype == ir.DataType.INT4 for v in graph.initializers.values()):
        graph.opset_imports[""] = max(graph.opset_imports[""], OPSET)


def dequantize(graph: ir.Graph, before: ir.Node, name: str, weight: QuantizedWeight) -> ir.Value:
    """Add the node that gives a weight (K, N) of codes and scales."""
    stem = f"{name}.int{weight.bits}.columns"
    N, K = weight.codes.shape
    dtype = TYPES[weight.bits]
    shape = ir.Shape((K, N))

    def read_codes() -> ir.TensorProtocol:  # only while they are written: else all are there twice
        return ir.Tensor(pack(weight.codes.T, weight.bits), dtype=dtype, shape=shape)

    codes = ir.LazyTensor(read_codes, dtype=dtype, shape=shape, name=stem)
    one_scale = weight.scale.shape[1] == 1
    scale = weight.scale[:, 0] if one_scale else np.ascontiguousarray(weight.scale.T)
    attributes = {"axis": 1} if one_scale else {"axis": ROWS, "block_size": weight.size}
    inputs = [
        add_initializer(graph, stem, codes),
        add_initializer(graph, f"{stem}.scale", ir.tensor(scale, name=f"{stem}.scale")),
    ]
    node = ir.node(OPERATOR, inputs, attributes, name=f"{name}/dequantize")
    node.metadata_props.update(before.metadata_props)  # its module
    node.metadata_props[WEIGHT] = name
    result = node.outputs[0]
    result.name = f"{name}.dequantized"
    result.type = ir.TensorType(ir.DataType.FLOAT)
    result.shape = ir.Shape((K, N))
    graph.insert_before(before, node)
    return result


def pack(codes: npt.NDArray[np.int8], bits: int) -> npt.NDArray[np.generic]:
    """Return codes (K, N) as onnx_ir takes them."""
    import ml_dtypes

    return np.ascontiguousarray(codes).astype(ml_dtypes.int4 if bits == 4 else np.int8)


def read(node: ir.Node, graph: ir.Graph) -> StoredWeight | None:
    """Return the weight that a node dequantizes."""
    first, second, zeros = (*node.inputs, None, None)[:3]
    if (found := read_constants(node, first, second)) is None:
        return None
    codes, packed, scale, scales = found
    K, N = packed.shape.numpy()
    bits = 4 if packed.dtype == ir.DataType.INT4 else 8
    blocks = 1 if len(scales.shape) == 1 else scales.shape.numpy()[0]

    def read_rows(rows: slice) -> QuantizedWeight:
        integers = packed.numpy().T[rows].astype(np.int8)
        own = scales.numpy().astype(np.float32).reshape(blocks, N).T[rows]
        return QuantizedWeight(integers, np.ascontiguousarray(own), bits)

    faults = list(find_faults(node, K, blocks))
    if zeros is not None:
        faults.append(WRONG_ZEROS.format(zeros.name))
    names = (node.metadata_props[WEIGHT],)
    return StoredWeight(
        node, names, bits, codes, scale, (N, K), read_rows, faults=tuple(faults), is_half=True
    )


def find_faults(node: ir.Node, K: int, blocks: int) -> list[str]:
    """Return in words which attributes would let an engine take other scales than `read` does."""
    axis = node.attributes.get_int("axis", 1)
    size = node.attributes.get_int("block_size", 0)
    expected = (1, 0) if blocks == 1 else (ROWS, K // blocks)
    if (axis, size) == expected:
        return []
    return [f"has axis {axis} and block_size {size}, not {expected[0]} and {expected[1]}"]
