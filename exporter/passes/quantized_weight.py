"""A quantized weight: codes and scales, both as chosen and as a graph's node reads them.

N rows of a weight (its outputs), K columns (its inputs), b columns in a block
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..number_formats import Codes, NumberFormat

Array = npt.NDArray[np.float32]

WEIGHT = "planforge.weight"  # a node's metadata: the parameter that it reads quantized
KEPT = "planforge.kept"  # likewise: that codes, scales and zero points are those of the checkpoint's files
WRONG_ZEROS = "has zero points {!r} that are not the middle of its values"


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight (N, K): codes * scale; of one that others quantized (codes - zeros) * scale."""

    codes: Codes  # (N, K), of the format's type
    scale: Array  # (N, K / b), float32
    format: NumberFormat
    kept: bool = False  # whether a checkpoint's files have it so
    zeros: Codes | None = None  # (N, K / b), of the codes' type; None where all are 0
    order: npt.NDArray[np.int64] | None = None  # where the columns lie in the weight (K,); None: as they are

    @property
    def size(self) -> int:
        """Return b, the number of columns that share a scale."""
        return int(self.codes.shape[1] // self.scale.shape[1])

    def dequantize(self) -> Array:
        """Return the weight (N, K) in float32."""
        blocks = self.codes.reshape(*self.scale.shape, -1).astype(np.float32)
        if self.zeros is not None:
            blocks -= self.zeros[..., None].astype(np.float32)
        blocks *= self.scale[..., None]
        values = blocks.reshape(self.codes.shape)
        if self.order is None:
            return values
        sorted_back = np.empty_like(values)
        sorted_back[:, self.order] = values
        return sorted_back


@dataclass(frozen=True)
class StoredRows:
    """The rounding of the rows that a product multiplies, as its graph stores it."""

    steps: tuple[ir.Value | None, ...]  # of all rows, for the product and for the node that rounds them
    zeros: tuple[ir.Value | None, ...]  # their zero points
    unsmoothing: ir.Value | None  # (K,): what they are multiplied by first

    @property
    def smoothing(self) -> Array | None:
        """Return the divisors (K,) of rows, by which the weight is multiplied; None without smoothing."""
        constant = None if self.unsmoothing is None else self.unsmoothing.const_value
        with np.errstate(all="ignore"):  # a damaged graph may have zeros
            return None if constant is None else np.asarray(1 / constant.numpy().astype(np.float32))


@dataclass(frozen=True)
class StoredWeight:
    """A quantized weight (N, K) as a node reads it."""

    node: ir.Node
    names: tuple[str, ...]  # of the parameters whose rows it has, one below the other
    format: NumberFormat
    codes: ir.Value
    scale: ir.Value
    shape: tuple[int, int]  # (N, K)
    read: Callable[[slice], QuantizedWeight]  # gives some of its rows
    faults: tuple[str, ...] = ()  # in words: the parts of the node that no export writes
    rows: StoredRows | None = None  # the rounding of its product's rows, where the graph does it
    unit: ir.Value | None = None  # of all scales, where they share one
    biases: ir.Value | None = None  # those of its parameters' modules, where it stores them side by side
    is_table: bool = False  # whether rows of it are looked up, by this node or by another

    @property
    def may_be_gptq(self) -> bool:
        """Return whether GPTQ may have rounded it: a product's weight, not a table."""
        return not self.is_table and (self.format.uses_gptq or self.rows is not None)

    @property
    def is_kept(self) -> bool:
        """Return whether its numbers are those of the checkpoint's files."""
        return KEPT in self.node.metadata_props

    @property
    def constants(self) -> list[ir.Value]:
        """Return all constants that store the weight."""
        unsmoothing = None if self.rows is None else self.rows.unsmoothing
        return [v for v in (self.codes, self.scale, self.unit, unsmoothing, self.biases) if v is not None]

    @property
    def bias_names(self) -> tuple[str, ...]:
        """Return the names of the biases that belong to its parameters."""
        return tuple(f"{name.removesuffix('weight')}bias" for name in self.names)


def read_constants(
    node: ir.Node, codes: ir.Value | None, scale: ir.Value | None
) -> tuple[ir.Value, ir.TensorProtocol, ir.Value, ir.TensorProtocol] | None:
    """Return a node's codes and scales with their tensors; None if no export can have written the node."""
    if WEIGHT not in node.metadata_props or codes is None or scale is None:
        return None
    if codes.const_value is None or scale.const_value is None:
        return None
    return codes, codes.const_value, scale, scale.const_value


def cut_rows(shape: tuple[int, ...], size: int) -> Iterator[slice]:
    """Yield slices of the rows of a matrix, each of about so many values."""
    step = max(1, size // shape[1])
    for first in range(0, shape[0], step):
        yield slice(first, min(first + step, shape[0]))
