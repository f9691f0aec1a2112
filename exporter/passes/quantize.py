"""Chooses which weights become int8 and int4, and their scales; `gptq` rounds, and `storage` stores them.

N rows of a weight (its outputs), K columns (its inputs), b columns in a block
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from .gptq import PIECE_NUMBERS, round_weight
from .int8_rows import RowProduct
from .quantized_weight import QuantizedWeight, cut_rows, find_range, round_scales
from .weights import LazyMapping, Weight, find_weight

Array = npt.NDArray[np.float32]

BLOCK_SIZES = (256, 128, 64, 32)  # columns that share a scale
PLAN_BLOCK_SIZES = (128, 64, 32)  # the same in int4 of TensorRT
MIN_ROWS = 32  # narrower results, such as classes, stay as they are
# Steps of a scale below the largest magnitude that int4 tries: clipping a little can round the rest better.
# With 8 / 7 the extreme becomes -7, so that its opposite is there too.
CLIPS = {8: (1.0,), 4: (8 / 7, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75)}


@dataclass(frozen=True)
class QuantizedWeights(Mapping[str, QuantizedWeight]):
    """A model's weights in int8 or int4, by their names.

    Each is rounded whenever somebody asks for it, but those that GPTQ rounded: that takes seconds, and all
    together take as much memory as half the model.
    """

    usual_bits: int  # of most
    size: int  # columns of a block
    bits: dict[str, int]
    read: Mapping[str, Callable[[], Array]]  # functions that give the weights (N, K)
    compensated: Mapping[str, QuantizedWeight] = field(default_factory=dict)  # those that GPTQ rounded
    # An encoder's weights whose activations are rounded too, by the names of all that read the same rows.
    products: dict[tuple[str, ...], RowProduct] = field(default_factory=dict)
    # Of a graph that computes in fp16: scales are in fp16 and positive, and one row of int8 shares a scale.
    is_half: bool = False

    def __getitem__(self, name: str) -> QuantizedWeight:
        if name in self.compensated:
            return self.compensated[name]
        return self.quantize(self.read[name](), self.bits[name])

    def quantize(self, weight: Array, bits: int, seen: Array | None = None) -> QuantizedWeight:
        """Round a weight (N, K) to `bits` in these blocks; see the function."""
        size = weight.shape[1] if self.is_half and bits == 8 else self.size
        return quantize(weight, bits, size, seen, half=self.is_half)

    def __contains__(self, name: object) -> bool:
        return name in self.bits  # a Mapping's own rounds the weight to find out

    def __iter__(self) -> Iterator[str]:
        return iter(self.bits)

    def __len__(self) -> int:
        return len(self.bits)

    def choose(self, weight: Weight) -> QuantizedWeight:
        """Return a graph's weight; one that is not a parameter, as in an import, is rounded as it is."""
        if weight.name in self:
            return self[weight.name]
        try:
            return self.quantize(weight.array(), self.usual_bits)
        except ValueError as error:
            raise ValueError(f"{weight.name}: {error}") from error

    def dequantize(self) -> Mapping[str, Array]:
        """Return the fp32 values (N, K) that the weights stand for, each computed on request."""
        return LazyMapping(self, QuantizedWeight.dequantize)

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's description of the weights."""
        value: dict[str, Any] = {"bits": self.usual_bits, "block_size": self.size}
        if others := {name: bits for name, bits in self.bits.items() if bits != self.usual_bits}:
            value["other_bits"] = others
        if self.products:
            value["rows"] = {"+".join(names): product.to_json() for names, product in self.products.items()}
        return value


def quantize(
    weight: Array, bits: int, size: int, seen: Array | None = None, half: bool = False
) -> QuantizedWeight:
    """Round a weight (N, K) to `bits`, each block of `size` columns with the scale of least squared error.

    With `half` scales are positive and in fp16, as TensorRT needs them. GPTQ keeps its products with `seen`
    (M, K) close, too: rows like those that it will multiply. A K that is not a multiple of `size` is a
    ValueError.
    """
    K = weight.shape[1]
    if K % size:
        raise ValueError(f"a width of {K} is not a multiple of the block of {size}")
    scales = []
    for rows in cut_rows(weight.shape, PIECE_NUMBERS):
        blocks = np.ascontiguousarray(weight[rows], np.float32).reshape(-1, K // size, size)
        scales.append(choose_scales(blocks, bits, half))
    return round_weight(weight, np.concatenate(scales), bits, seen)


def find_reach(blocks: Array, bits: int, half: bool) -> Array:
    """Return the value (N, K / b) of each block (N, K / b, b) that becomes the top code at clip 1."""
    if half:
        return np.asarray(np.abs(find_extremes(blocks)))
    # In int4 the extreme itself becomes -8.
    return np.asarray(find_extremes(blocks) * np.float32(-7 / 8 if bits == 4 else 1))


def choose_scales(blocks: Array, bits: int, half: bool = False) -> Array:
    """Return the scale of least squared error (N, K / b) of each block (N, K / b, b)."""
    low, top = find_range(bits)
    largest = find_reach(blocks, bits, half)
    clips = [clip / top for clip in CLIPS[bits]]
    scales = np.stack([largest * np.float32(clip) for clip in clips])
    if half:
        scales = round_scales(scales)
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
    """Return the nodes that multiply by a constant matrix, except for narrow ones."""
    found = [(node, find_weight(node)) for node in graph]
    return [(node, weight) for node, weight in found if weight is not None and weight.rows >= MIN_ROWS]


def find_lookups(graph: ir.Graph) -> list[tuple[ir.Node, Weight]]:
    """Return the nodes that look up words, with their tables."""
    found = []
    for node in graph:
        table = node.inputs[0] if node.op_type == "Gather" and node.inputs[1] in graph.inputs else None
        constant = None if table is None else table.const_value
        if constant is not None and table is not None and len(constant.shape) == 2:
            rows = constant.shape.numpy()[0]
            found.append((node, Weight(str(table.name), rows, constant.numpy, table)))
    return found


def find_quantizable(graph: ir.Graph) -> list[tuple[ir.Node, Weight]]:
    """Return the nodes that read a quantizable weight, each with that weight."""
    return [*find_products(graph), *find_lookups(graph)]


def find_extremes(blocks: Array) -> Array:
    """Return the value of the largest magnitude (N, K / b) of each block (N, K / b, b); never zero."""
    where = np.abs(blocks).argmax(-1)[..., None]
    found: Array = np.take_along_axis(blocks, where, -1)[..., 0]
    return np.where(found == 0, np.finfo(np.float32).tiny, found)
