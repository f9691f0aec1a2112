"""Weight-only int8 and int4: MatMulNBits, and one quantized table for the embedding and the head.

N rows of a weight (its outputs), K columns (its inputs), b columns in a block, V vocabulary, E width
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .biases import find_bias_add, find_vector, split_bias_gelus
from .gptq import round_to_nearest, round_with_gptq
from .tables import replace_by_parts
from .weights import (
    MICROSOFT,
    LazyMapping,
    View,
    Weight,
    add_initializer,
    find_weight,
    make_lazy_tensor,
)

Array = npt.NDArray[np.float32]

WEIGHT = "planforge.weight"  # a node's metadata: the parameter that it reads quantized
BLOCK_SIZES = (256, 128, 64, 32)  # columns that share a scale
ACCURACY_INT8 = 4  # MatMulNBits' accuracy_level: activations are rounded to int8, a block at a time
PIECE_NUMBERS = 2**18  # of a weight that are rounded at a time: as many as stay in the processor's cache
LEAST_ROWS = 32  # narrower results, such as classes, stay as they are
# Steps of a scale below the largest magnitude that int4 tries: clipping a little can round the rest better.
# With 8 / 7 the extreme becomes -7, so that its opposite is there too.
CLIPS = {8: (1.0,), 4: (8 / 7, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75)}


@dataclass(frozen=True)
class Blocks:
    """A weight (N, K) in int8 or int4: q * scale, with q from -127 to 127 or from -8 to 7."""

    q: npt.NDArray[np.int8]  # (N, K / b, b)
    scale: Array  # (N, K / b), float32
    bits: int

    @property
    def size(self) -> int:
        return int(self.q.shape[2])

    def dequantize(self) -> Array:
        """Return the weight (N, K) in float32."""
        return (self.q * self.scale[..., None]).reshape(len(self.q), -1)

    def pack(self) -> npt.NDArray[np.uint8]:
        """Return bytes (N, K / b, b * bits / 8) around 2^(bits-1); the first of two int4 is the low half."""
        offset = self.q.view(np.uint8) + np.uint8(1 << (self.bits - 1))  # wraps around, as it should
        if self.bits == 8:
            return np.asarray(offset)
        return np.asarray(offset[..., 0::2] | (offset[..., 1::2] << 4))


def dequantize(weights: Mapping[str, Blocks]) -> Mapping[str, Array]:
    """Return weights as the fp32 numbers (N, K) that they stand for, each made when it is asked for."""
    return LazyMapping(weights, Blocks.dequantize)


def quantize(weight: Array, bits: int, size: int, seen: Array | None = None) -> Blocks:
    """Round a weight (N, K) to `bits`, each block of `size` columns with the scale of least squared error.

    GPTQ keeps its products with `seen` (M, K) close, too: rows like those that it will multiply. A K that is
    not a multiple of `size` is a ValueError.
    """
    N, K = weight.shape
    if K % size:
        raise ValueError(f"a width of {K} is not a multiple of the block of {size}")
    low, top = find_range(bits)
    q = np.empty((N, K // size, size), np.int8)
    scale = np.empty((N, K // size), np.float32)
    step = max(1, PIECE_NUMBERS // K)
    for rows in (slice(first, first + step) for first in range(0, N, step)):
        blocks = np.ascontiguousarray(weight[rows], np.float32).reshape(-1, K // size, size)
        scale[rows] = choose_scales(blocks, bits)
        if seen is None:
            q[rows] = round_to_nearest(blocks, scale[rows][..., None], low, top)
    if seen is not None:
        columns = round_with_gptq(np.ascontiguousarray(weight.T, np.float32), scale.T, low, top, seen)
        q = np.ascontiguousarray(columns.T).reshape(q.shape)
    return Blocks(q, scale, bits)


def find_range(bits: int) -> tuple[int, int]:
    """Return the lowest and the highest number of a quantized weight; int4 has one step more below 0."""
    top = (1 << (bits - 1)) - 1
    return (-top - 1 if bits == 4 else -top), top


def choose_scales(blocks: Array, bits: int) -> Array:
    """Return the scale of least squared error (N, K / b) of each block (N, K / b, b)."""
    low, top = find_range(bits)
    largest = find_extremes(blocks)
    if bits == 4:  # the extreme itself becomes -8
        largest = -largest * (top / (top + 1))
    clips = [clip / top for clip in CLIPS[bits]]
    scales = np.stack([largest * np.float32(clip) for clip in clips])
    if len(scales) == 1:
        return np.asarray(scales[0])
    shares = blocks / largest[..., None]
    lost = np.empty_like(shares)
    rounded = np.empty_like(shares)
    errors = []
    for clip in clips:
        np.multiply(shares, np.float32(1 / clip), out=lost)
        np.rint(lost, out=rounded)
        np.clip(rounded, low, top, out=rounded)
        lost -= rounded
        errors.append(np.einsum("nkb,nkb->nk", lost, lost) * np.float32(clip**2))
    best: Array = np.take_along_axis(scales, np.argmin(errors, axis=0)[None], 0)[0]
    return best


def find_products(graph: ir.Graph) -> list[tuple[ir.Node, Weight]]:
    """Return the nodes that multiply by a constant matrix, but for narrow ones."""
    found = [(node, find_weight(node)) for node in graph]
    return [(node, weight) for node, weight in found if weight is not None and weight.rows >= LEAST_ROWS]


def find_lookups(graph: ir.Graph) -> list[tuple[ir.Node, ir.Value]]:
    """Return the nodes that look up words, with their tables."""
    found = []
    for node in graph:
        table = node.inputs[0] if node.op_type == "Gather" and node.inputs[1] in graph.inputs else None
        if table is not None and table.const_value is not None and len(table.const_value.shape) == 2:
            found.append((node, table))
    return found


def find_quantizable(graph: ir.Graph) -> list[tuple[str, Callable[[], Array]]]:
    """Return the weights that `quantize_weights` rounds: names, and functions that give (N, K)."""
    found = [(weight.name, weight.array) for _, weight in find_products(graph)]
    for _, table in find_lookups(graph):
        assert table.const_value is not None
        found.append((str(table.name), table.const_value.numpy))
    return found


def read_stored_bits(graph: ir.Graph) -> dict[str, int]:
    """Return the bits of each weight that `quantize_weights` has rounded, by name."""
    quantized = [node for node in graph if WEIGHT in node.metadata_props]
    return {node.metadata_props[WEIGHT]: node.attributes["bits"].as_int() for node in quantized}


def find_extremes(blocks: Array) -> Array:
    """Return the value of the largest magnitude (N, K / b) of each block (N, K / b, b); never zero."""
    where = np.abs(blocks).argmax(-1)[..., None]
    found: Array = np.take_along_axis(blocks, where, -1)[..., 0]
    return np.where(found == 0, np.finfo(np.float32).tiny, found)


def quantize_weights(
    model: ir.Model, bits: int, size: int, known: Mapping[str, Blocks] = MappingProxyType({})
) -> None:
    """Quantize the constant side of each MatMul, and the tables of words, to 8 or 4 `bits`.

    `size`, one of `BLOCK_SIZES`, is the number of columns of a block, which has a scale. What `known` has by
    name is quantized already.
    """
    graph = model.graph
    done: dict[str, Blocks] = {}
    for name, array in find_quantizable(graph):
        try:
            if name not in done:
                done[name] = known[name] if name in known else quantize(array(), bits, size)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    split_bias_gelus(graph)
    for node, weight in find_products(graph):
        replace_product(graph, node, weight, done[weight.name])
    for node, table in find_lookups(graph):
        replace_lookup(graph, node, str(table.name), done[str(table.name)])
    RemoveUnusedNodesPass()(model)
    graph.opset_imports[MICROSOFT] = 1


def make_tensors(name: str, blocks: Blocks) -> tuple[ir.TensorProtocol, ir.TensorProtocol]:
    """Return the tensors for the weights file: (N, K / b, bytes) uint8 and (N, K / b) float32."""
    stem = f"{name}.int{blocks.bits}"
    shape = (*blocks.scale.shape, blocks.size * blocks.bits // 8)
    packed = make_lazy_tensor(blocks.pack, shape, np.dtype(np.uint8), stem)  # else all are there twice
    return packed, ir.tensor(blocks.scale, name=f"{stem}.scale")


def replace_product(graph: ir.Graph, node: ir.Node, weight: Weight, blocks: Blocks) -> None:
    packed, scale = make_tensors(weight.name, blocks)
    if (add := find_bias_add(node)) is not None:  # the product adds it too
        weight = replace(weight, bias=find_vector(add))
        ir.convenience.replace_all_uses_with(add.outputs[0], node.outputs[0], replace_graph_outputs=True)
        node.outputs[0].name = add.outputs[0].name
        add.outputs[0].name = None
        graph.remove(add, safe=True)
    attributes = {
        "K": blocks.scale.shape[1] * blocks.size,
        "N": len(blocks.q),
        "bits": blocks.bits,
        "block_size": blocks.size,
        "accuracy_level": ACCURACY_INT8,
    }
    inputs = [node.inputs[0]]
    inputs += [add_initializer(graph, str(tensor.name), tensor) for tensor in (packed, scale)]
    if weight.bias is not None:
        inputs += [None, None, weight.bias]
    product = ir.node("MatMulNBits", inputs, attributes, domain=MICROSOFT)
    product.metadata_props[WEIGHT] = weight.name
    replace_by_parts(graph, node, [product])


def replace_lookup(graph: ir.Graph, node: ir.Node, name: str, blocks: Blocks) -> None:
    packed, scale = make_tensors(name, blocks)
    flat = (len(blocks.q), packed.size // len(blocks.q))
    inputs = [
        add_initializer(graph, f"{packed.name}.table", View(packed, 0, flat)),
        node.inputs[1],
        add_initializer(graph, f"{scale.name}.table", View(scale, 0, scale.shape.numpy())),
    ]
    attributes = {"bits": blocks.bits, "block_size": blocks.size, "gather_axis": 0, "quantize_axis": 1}
    gather = ir.node("GatherBlockQuantized", inputs, attributes, domain=MICROSOFT)
    gather.metadata_props[WEIGHT] = name
    replace_by_parts(graph, node, [gather])
