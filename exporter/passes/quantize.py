"""Chooses which weights are quantized, and their scales; `gptq` rounds, and `storage` stores them.

N rows of a weight (its outputs), K columns (its inputs), b columns in a block
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..number_formats import CPU_INTEGERS, ROW_INT8, NumberFormat, NumberFormats
from .gptq import PIECE_NUMBERS, round_weight
from .int8_rows import RowProduct
from .quantized_weight import QuantizedWeight, cut_rows
from .routing import chooses_experts
from .weights import LazyMapping, Weight, find_weight

Array = npt.NDArray[np.float32]

LARGEST_STEP = np.float32(2.0**32)  # as a share of the largest value: a block of zeros has a scale as well
MIN_ROWS = 32  # narrower results, such as classes, stay as they are


@dataclass(frozen=True)
class QuantizedWeights(Mapping[str, QuantizedWeight]):
    """A model's quantized weights, by their names.

    Each is rounded whenever somebody asks for it, but those that GPTQ rounded: that takes seconds, and all
    together take as much memory as half the model.
    """

    usual_bits: int  # of most
    size: int  # columns of a block
    bits: dict[str, int]  # where there is no format of so many the weight stays as it is
    read: Mapping[str, Callable[[], Array]]  # functions that give the weights (N, K)
    compensated: Mapping[str, QuantizedWeight] = field(default_factory=dict)  # those that GPTQ rounded
    # An encoder's weights whose activations are rounded too, by the names of all that read the same rows.
    products: dict[tuple[str, ...], RowProduct] = field(default_factory=dict)
    formats: NumberFormats = field(default_factory=lambda: CPU_INTEGERS)

    def __getitem__(self, name: str) -> QuantizedWeight:
        if name in self.compensated:
            return self.compensated[name]
        return self.quantize(self.read[name](), self.bits[name])

    @property
    def is_half(self) -> bool:
        """Return whether they are weights of a graph that computes in fp16."""
        return self.formats[8].is_positive

    def quantize(self, weight: Array, bits: int) -> QuantizedWeight:
        """Round a weight (N, K) to `bits` in these blocks; see the function."""
        format = self.formats[bits]
        return quantize(weight, format, format.choose_block(weight.shape[1], self.size))

    def __contains__(self, name: object) -> bool:
        return self.bits.get(str(name)) in self.formats  # a Mapping's own rounds the weight to find out

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.bits if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def is_float(self, weight: Weight) -> bool:
        """Tell whether a graph's weight stays as it is."""
        return weight.name in self.bits and weight.name not in self

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
            if self.formats is CPU_INTEGERS:
                value["pair_top"] = ROW_INT8.pair_top
            value["rows"] = {"+".join(names): product.to_json() for names, product in self.products.items()}
        return value


def quantize(weight: Array, format: NumberFormat, size: int, seen: Array | None = None) -> QuantizedWeight:
    """Round a weight (N, K), each block of `size` columns with the scale of least squared error.

    GPTQ keeps its products with `seen` (M, K) close, too: rows like those that it will multiply. A K that is
    not a multiple of `size` is a ValueError.
    """
    return round_weight(weight, choose_scales(weight, format, size), format, seen)


def choose_scales(weight: Array, format: NumberFormat, size: int) -> Array:
    """Return the scale of least squared error (N, K / b) of each block of `size` columns; see `quantize`."""
    K = weight.shape[1]
    if K % size:
        raise ValueError(f"a width of {K} is not a multiple of the block of {size}")
    scales = []
    for rows in cut_rows(weight.shape, PIECE_NUMBERS):
        blocks = np.ascontiguousarray(weight[rows], np.float32).reshape(-1, K // size, size)
        scales.append(choose_best(blocks, format))
    chosen = np.concatenate(scales)
    smallest = format.find_smallest_scale(chosen)
    return np.maximum(chosen, np.float32(smallest)) if format.is_positive else chosen


def choose_best(blocks: Array, format: NumberFormat) -> Array:
    """Return the scale of least squared error (N, K / b) of each block (N, K / b, b)."""
    scales = format.list_scales(blocks)
    if len(scales) == 1:
        return np.asarray(scales[0])
    reach = format.find_reach(blocks)
    shares = blocks / reach[..., None]
    lost = np.empty_like(shares)
    rounded = np.empty_like(shares)
    errors = []
    for scale in scales:
        step = np.minimum(scale / reach, LARGEST_STEP)
        np.multiply(shares, (1 / step)[..., None], out=lost)
        lost -= format.snap(lost, out=rounded)
        errors.append(np.einsum("nkb,nkb->nk", lost, lost) * step**2)
    best: Array = np.take_along_axis(scales, np.argmin(errors, axis=0)[None], 0)[0]
    return best


def find_products(graph: ir.Graph) -> list[tuple[ir.Node, Weight]]:
    """Return the nodes that multiply by a constant matrix, but for narrow ones and choices of experts."""
    found = [(node, find_weight(node)) for node in graph]
    return [
        (node, weight)
        for node, weight in found
        if weight is not None and weight.rows >= MIN_ROWS and not chooses_experts(node)
    ]


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
