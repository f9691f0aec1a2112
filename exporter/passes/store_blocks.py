"""Stores weights in int8 and int4 for ONNX Runtime: MatMulNBits, and one table for embedding and head.

Graphs that compute in fp16 have tables in fp16, and weights of the same values as graphs for plans: the scale
of a whole row is there for each of its blocks.

N rows of a weight (its outputs), K columns (its inputs), b columns in a block
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ..number_formats import CPU_INTEGERS, CPU_SIZES, PLAN_INTEGERS
from .biases import find_bias_add, find_vector, split_bias_gelus
from .neighbours import find_producer
from .quantize import QuantizedWeights, find_products, find_quantizable
from .quantized_weight import KEPT, WEIGHT, WRONG_ZEROS, QuantizedWeight, StoredWeight, read_constants
from .tables import replace_by_parts
from .weights import MICROSOFT, View, Weight, add_initializer, make_lazy_tensor

PRODUCT = "MatMulNBits"
LOOKUP = "GatherBlockQuantized"
OPERATORS: tuple[str, ...] = (PRODUCT, LOOKUP)

ACCURACY_INT8 = 4  # MatMulNBits' accuracy_level: activations are rounded to int8, a block at a time
LARGEST_BLOCK = 128  # of those that CUDA's fast kernels take
SMALLEST_BLOCK = 16  # that the operator takes


def pack(codes: npt.NDArray[np.int8], bits: int) -> npt.NDArray[np.uint8]:
    """Return codes (..., K) as bytes around 2^(bits-1); the first of two in int4 is the low half."""
    offset = codes.view(np.uint8) + np.uint8(1 << (bits - 1))  # wraps around, as it should
    return np.asarray(offset if bits == 8 else offset[..., 0::2] | (offset[..., 1::2] << 4))


def unpack(packed: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int8]:
    """Return the codes (N, K) of bytes (N, K * bits / 8)."""
    if bits == 4:
        packed = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    codes: npt.NDArray[np.int8] = (packed - np.uint8(1 << (bits - 1))).view(np.int8)  # wraps around too
    return codes


def store(model: ir.Model, weights: QuantizedWeights) -> None:
    """Let every product by a constant, and every embedding matrix, read codes and scales.

    In a graph for fp16 embedding matrices stay as they are. A width that no block fits is a ValueError.
    """
    graph = model.graph
    split_bias_gelus(graph)
    chosen: dict[str, QuantizedWeight] = {}
    for node, weight in find_products(graph) if weights.is_half else find_quantizable(graph):
        if weights.is_float(weight):
            continue
        if weight.name not in chosen:
            chosen[weight.name] = spread_scales(weight.name, weights.choose(weight))
        replace = replace_lookup if node.op_type == "Gather" else replace_product
        replace(graph, node, weight, chosen[weight.name])
    RemoveUnusedNodesPass()(model)
    graph.opset_imports[MICROSOFT] = 1


def spread_scales(name: str, weight: QuantizedWeight) -> QuantizedWeight:
    """Return a weight with a scale for each block, of a size that the operator has, where a row has one."""
    K = weight.codes.shape[1]
    if weight.format.block_sizes != (0,) and weight.size in CPU_SIZES:
        return weight
    size = math.gcd(weight.size, LARGEST_BLOCK)
    if size < SMALLEST_BLOCK:
        raise ValueError(f"{name}: a width of {K} is not a multiple of {SMALLEST_BLOCK}; export fp16")
    times = weight.size // size
    zeros = None if weight.zeros is None else np.repeat(weight.zeros, times, axis=1)
    return replace(weight, scale=np.repeat(weight.scale, times, axis=1), zeros=zeros)


def make_tensors(
    name: str, weight: QuantizedWeight
) -> tuple[ir.TensorProtocol, ir.TensorProtocol, ir.TensorProtocol | None]:
    """Return the tensors for the weights file: (N, K / b, bytes) uint8 and (N, K / b) float32.

    The third has zero points (N, K / b * bits / 8) uint8, padded to whole bytes; None where all are 0.
    """
    stem = f"{name}.{weight.format.name}"
    shape = (*weight.scale.shape, weight.size * weight.format.bits // 8)

    def read() -> npt.NDArray[np.uint8]:  # only while it is written: else all are there twice
        return pack(weight.codes, weight.format.bits).reshape(shape)

    packed = make_lazy_tensor(read, shape, np.dtype(np.uint8), stem)
    zeros = None
    if weight.zeros is not None:
        padded = np.pad(weight.zeros, ((0, 0), (0, weight.zeros.shape[1] * weight.format.bits // 4 % 2)))
        zeros = ir.tensor(pack(padded, weight.format.bits), name=f"{stem}.zeros")
    return packed, ir.tensor(weight.scale, name=f"{stem}.scale"), zeros


def replace_product(graph: ir.Graph, node: ir.Node, weight: Weight, quantized: QuantizedWeight) -> None:
    packed, scale, zeros = make_tensors(weight.name, quantized)
    bias = weight.bias
    in_half = quantized.format.is_positive
    # The product adds it too; in a graph for fp16, where CUDA's kernel does not, it may have to be in fp32.
    if (add := None if in_half else find_bias_add(node)) is not None:
        bias = find_vector(add)
        ir.convenience.replace_all_uses_with(add.outputs[0], node.outputs[0], replace_graph_outputs=True)
        node.outputs[0].name = add.outputs[0].name
        add.outputs[0].name = None
        graph.remove(add, safe=True)
    N, K = quantized.codes.shape
    attributes = {
        "K": K,
        "N": N,
        "bits": quantized.format.bits,
        "block_size": quantized.size,
    }
    if not in_half:
        attributes["accuracy_level"] = ACCURACY_INT8
    rows = node.inputs[0]
    if quantized.order is not None:
        rows = gather_columns(graph, node, weight.name, quantized.order)
    inputs = [rows, *(add_initializer(graph, str(tensor.name), tensor) for tensor in (packed, scale))]
    if zeros is not None:
        inputs.append(add_initializer(graph, str(zeros.name), zeros))
    if bias is not None:
        inputs += [*[None] * (5 - len(inputs)), bias]
    product = ir.node(PRODUCT, inputs, attributes, domain=MICROSOFT)
    product.metadata_props[WEIGHT] = weight.name
    if quantized.kept:
        product.metadata_props[KEPT] = "numbers"
    name = node.name
    replace_by_parts(graph, node, [product])
    if in_half:
        product.name = name  # by which calibration knows it


def gather_columns(graph: ir.Graph, node: ir.Node, name: str, order: npt.NDArray[np.int64]) -> ir.Value:
    """Return what a product reads, with its columns in an order: by a node of the product's own module."""
    rows = node.inputs[0]
    assert rows is not None
    columns = add_initializer(graph, f"{name}.order", ir.tensor(order, name=f"{name}.order"))
    gather = ir.node("Gather", [rows, columns], {"axis": -1}, name=f"{node.name}.order")
    gather.metadata_props.update(node.metadata_props)
    gather.outputs[0].name = f"{node.name}.ordered"
    gather.outputs[0].type = rows.type
    gather.outputs[0].shape = rows.shape
    graph.insert_before(node, gather)
    return gather.outputs[0]


def replace_lookup(graph: ir.Graph, node: ir.Node, weight: Weight, quantized: QuantizedWeight) -> None:
    packed, scale, zeros = make_tensors(weight.name, quantized)
    flat = (len(quantized.codes), packed.size // len(quantized.codes))
    inputs = [
        add_initializer(graph, f"{packed.name}.table", View(packed, 0, flat)),
        node.inputs[1],
        add_initializer(graph, f"{scale.name}.table", View(scale, 0, scale.shape.numpy())),
    ]
    if zeros is not None:
        inputs.append(add_initializer(graph, f"{zeros.name}.table", zeros))
    attributes = {"bits": quantized.format.bits, "block_size": quantized.size}
    attributes |= {"gather_axis": 0, "quantize_axis": 1}
    gather = ir.node(LOOKUP, inputs, attributes, domain=MICROSOFT)
    gather.metadata_props[WEIGHT] = weight.name
    if quantized.kept:
        gather.metadata_props[KEPT] = "numbers"
    replace_by_parts(graph, node, [gather])


def read(node: ir.Node, graph: ir.Graph) -> StoredWeight | None:
    """Return the weight that a product or a lookup reads."""
    first, second, scale, zeros, order = (*node.inputs, None, None)[:5]
    is_table = node.op_type == LOOKUP
    if (stored := read_constants(node, first if is_table else second, scale)) is None:
        return None
    codes, packed, scale, scales = stored
    bits = node.attributes["bits"].as_int()
    accuracy = node.attributes.get_int("accuracy_level", 0)
    formats = CPU_INTEGERS if is_table or accuracy else PLAN_INTEGERS
    if (format := formats.get(bits)) is None:
        return None
    N = packed.shape.numpy()[0]
    K = packed.size // N * 8 // bits
    blocks = K // node.attributes["block_size"].as_int()

    one_scale = format.block_sizes == (0,)  # of a row, which is there for each block
    is_kept = KEPT in node.metadata_props
    own_zeros = read_zeros(zeros, N, blocks, bits) if is_kept else None
    columns = read_order(node, K) if is_kept and not is_table else None

    def read_rows(rows: slice) -> QuantizedWeight:
        found = unpack(packed.numpy().reshape(N, -1)[rows], bits)
        scale = scales.numpy().reshape(N, blocks)[rows].astype(np.float32)
        scale = scale[:, :1] if one_scale else scale
        own = None if own_zeros is None else own_zeros[rows]
        return QuantizedWeight(found, scale, format, kept=is_kept, zeros=own, order=columns)

    faults = []
    if one_scale and (mixed := find_mixed_row(scales.numpy().reshape(N, blocks))) is not None:
        faults.append(f"has more than one scale in row {mixed}")
    if accuracy and scales.dtype == ir.DataType.FLOAT16:
        faults.append(f"has accuracy_level {accuracy}, and multiplies in fp16")
    if zeros is not None and own_zeros is None and not are_middle(zeros, N, blocks, bits):
        faults.append(WRONG_ZEROS.format(zeros.name))
    if order is not None and not is_table:
        faults.append("has an order of columns, which no graph of this exporter has")
    names = (node.metadata_props[WEIGHT],)
    return StoredWeight(
        node, names, format, codes, scale, (N, K), read_rows, faults=tuple(faults), is_table=is_table
    )


def find_mixed_row(scales: npt.NDArray[Any]) -> int | None:
    """Return the first row whose scales (N, K / b) differ from block to block; None where none do."""
    mixed = (scales != scales[:, :1]).any(axis=1)
    return int(mixed.argmax()) if mixed.any() else None


def read_zeros(zeros: ir.Value | None, N: int, blocks: int, bits: int) -> npt.NDArray[np.int8] | None:
    """Return zero points (N, K / b) from the middle of the codes on; None for others than packed ones."""
    constant = None if zeros is None else ir.convenience.get_const_tensor(zeros)
    found = None if constant is None else constant.numpy()
    width = -(-blocks * bits // 8)
    if found is None or found.dtype != np.uint8 or found.size != N * width:
        return None
    return unpack(found.reshape(N, width), bits)[:, :blocks]


def read_order(node: ir.Node, K: int) -> npt.NDArray[np.int64] | None:
    """Return the order (K,) in which a product reads columns; None where it is theirs."""
    gather = find_producer(node.inputs[0], "Gather")
    found = None if gather is None else read_columns(gather)
    is_order = found is not None and np.array_equal(np.sort(found), np.arange(K))
    return found if is_order else None


def read_columns(gather: ir.Node) -> npt.NDArray[np.int64] | None:
    """Return the constant columns that a Gather takes of the last axis; None for another."""
    if gather.inputs[1] is None or gather.attributes.get_int("axis", 0) != -1:
        return None
    constant = ir.convenience.get_const_tensor(gather.inputs[1])
    return None if constant is None else np.asarray(constant.numpy().reshape(-1), np.int64)


def are_middle(zeros: ir.Value, N: int, blocks: int, bits: int) -> bool:
    """Tell whether zero points, one for each block, are 2^(bits-1), the value used where none are given."""
    constant = ir.convenience.get_const_tensor(zeros)
    if constant is None:
        return False
    found: npt.NDArray[Any] = constant.numpy()
    if found.dtype != np.uint8:
        return bool((found == 1 << (bits - 1)).all())
    width = -(-blocks * bits // 8)  # of a row; the last byte may be half empty
    return found.size == N * width and not unpack(found.reshape(N, width), bits)[:, :blocks].any()
