"""Stores weights in int8 and int4 for ONNX Runtime: MatMulNBits, and one table for embedding and head.

N rows of a weight (its outputs), K columns (its inputs), b columns in a block
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .biases import find_bias_add, find_vector, split_bias_gelus
from .quantize import QuantizedWeights, find_lookups, find_products, find_quantizable
from .quantized_weight import QuantizedWeight, StoredWeight
from .tables import replace_by_parts
from .weights import MICROSOFT, View, Weight, add_initializer, make_lazy_tensor

PRODUCT = "MatMulNBits"
LOOKUP = "GatherBlockQuantized"
OPERATORS: tuple[str, ...] = (PRODUCT, LOOKUP)
# Where they read codes, in bytes (N, K / b, b * bits / 8); then scales (N, K / b), and zero points.
CODES = {PRODUCT: 1, LOOKUP: 0}
SCALE = 2
ZEROS = 3
ORDER = 4  # of a product's columns
BIAS = 5

WEIGHT = "planforge.weight"  # a node's metadata: the parameter that it reads quantized
ACCURACY_INT8 = 4  # MatMulNBits' accuracy_level: activations are rounded to int8, a block at a time


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
    """Let every product by a constant, and every table of words, read codes and scales."""
    graph = model.graph
    chosen: dict[str, QuantizedWeight] = {}
    for name, array in find_quantizable(graph):
        if name not in chosen:
            chosen[name] = weights.choose(name, array)
    split_bias_gelus(graph)
    for node, weight in find_products(graph):
        replace_product(graph, node, weight, chosen[weight.name])
    for node, table in find_lookups(graph):
        replace_lookup(graph, node, str(table.name), chosen[str(table.name)])
    RemoveUnusedNodesPass()(model)
    graph.opset_imports[MICROSOFT] = 1


def make_tensors(name: str, weight: QuantizedWeight) -> tuple[ir.TensorProtocol, ir.TensorProtocol]:
    """Return the tensors for the weights file: (N, K / b, bytes) uint8 and (N, K / b) float32."""
    stem = f"{name}.int{weight.bits}"
    shape = (*weight.scale.shape, weight.size * weight.bits // 8)

    def read() -> npt.NDArray[np.uint8]:  # only while it is written: else all are there twice
        return pack(weight.codes, weight.bits).reshape(shape)

    packed = make_lazy_tensor(read, shape, np.dtype(np.uint8), stem)
    return packed, ir.tensor(weight.scale, name=f"{stem}.scale")


def replace_product(graph: ir.Graph, node: ir.Node, weight: Weight, quantized: QuantizedWeight) -> None:
    packed, scale = make_tensors(weight.name, quantized)
    if (add := find_bias_add(node)) is not None:  # the product adds it too
        weight = replace(weight, bias=find_vector(add))
        ir.convenience.replace_all_uses_with(add.outputs[0], node.outputs[0], replace_graph_outputs=True)
        node.outputs[0].name = add.outputs[0].name
        add.outputs[0].name = None
        graph.remove(add, safe=True)
    N, K = quantized.codes.shape
    attributes = {
        "K": K,
        "N": N,
        "bits": quantized.bits,
        "block_size": quantized.size,
        "accuracy_level": ACCURACY_INT8,
    }
    inputs = [node.inputs[0]]
    inputs += [add_initializer(graph, str(tensor.name), tensor) for tensor in (packed, scale)]
    if weight.bias is not None:
        inputs += [None, None, weight.bias]
    product = ir.node(PRODUCT, inputs, attributes, domain=MICROSOFT)
    product.metadata_props[WEIGHT] = weight.name
    replace_by_parts(graph, node, [product])


def replace_lookup(graph: ir.Graph, node: ir.Node, name: str, quantized: QuantizedWeight) -> None:
    packed, scale = make_tensors(name, quantized)
    flat = (len(quantized.codes), packed.size // len(quantized.codes))
    inputs = [
        add_initializer(graph, f"{packed.name}.table", View(packed, 0, flat)),
        node.inputs[1],
        add_initializer(graph, f"{scale.name}.table", View(scale, 0, scale.shape.numpy())),
    ]
    attributes = {"bits": quantized.bits, "block_size": quantized.size}
    attributes |= {"gather_axis": 0, "quantize_axis": 1}
    gather = ir.node(LOOKUP, inputs, attributes, domain=MICROSOFT)
    gather.metadata_props[WEIGHT] = name
    replace_by_parts(graph, node, [gather])


def read(node: ir.Node, graph: ir.Graph) -> StoredWeight | None:
    """Return the weight that a product or a lookup reads."""
    codes, scale = node.inputs[CODES[node.op_type]], node.inputs[SCALE]
    if WEIGHT not in node.metadata_props or codes is None or scale is None:
        return None
    packed, scales = codes.const_value, scale.const_value
    if packed is None or scales is None:
        return None
    bits = node.attributes["bits"].as_int()
    N = packed.shape.numpy()[0]
    K = packed.size // N * 8 // bits
    blocks = K // node.attributes["block_size"].as_int()

    def read_rows(rows: slice) -> QuantizedWeight:
        found = unpack(packed.numpy().reshape(N, -1)[rows], bits)
        return QuantizedWeight(found, scales.numpy().reshape(N, blocks)[rows], bits)

    zeros = node.inputs[ZEROS] if len(node.inputs) > ZEROS else None
    return StoredWeight(
        node=node,
        names=(node.metadata_props[WEIGHT],),
        bits=bits,
        codes=codes,
        scale=scale,
        shape=(N, K),
        read=read_rows,
        wrong_zeros=None if zeros is None or are_middle(zeros, N, blocks, bits) else zeros,
        has_order=node.op_type == PRODUCT and len(node.inputs) > ORDER and node.inputs[ORDER] is not None,
        is_table=node.op_type == LOOKUP,
    )


def are_middle(zeros: ir.Value, N: int, blocks: int, bits: int) -> bool:
    """Tell whether zero points, one for each block, are 2^(bits-1), as they are where none are given."""
    constant = ir.convenience.get_const_tensor(zeros)
    if constant is None:
        return False
    found: npt.NDArray[Any] = constant.numpy()
    if found.dtype != np.uint8:
        return bool((found == 1 << (bits - 1)).all())
    width = -(-blocks * bits // 8)  # of a row; the last byte may be half empty
    return found.size == N * width and not unpack(found.reshape(N, width), bits)[:, :blocks].any()
