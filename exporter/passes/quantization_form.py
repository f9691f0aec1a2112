"""The form of QuantizeLinear and DequantizeLinear that TensorRT computes, and what is wrong with another.

See https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

QUANTIZES = "QuantizeLinear"
DEQUANTIZES = "DequantizeLinear"
OPERATORS = (QUANTIZES, DEQUANTIZES)
KEPT = "planforge.kept"  # a node's metadata: what of it no pass may change, as somebody else chose it
FIX = "quantize symmetrically, with zero point 0, finite positive scales, and blocks that divide the axis"

Numbers = npt.NDArray[Any]


def find_form_faults(node: ir.Node, read: Callable[[ir.Value | None], Numbers | None]) -> Iterator[str]:
    """Yield in words what keeps TensorRT from computing a node of `OPERATORS`.

    `read` returns a constant's numbers; None where they are not known, which is no fault.
    """
    data, scale, zeros = (*node.inputs, None, None)[:3]
    shifts = read(zeros)
    if shifts is not None and np.any(np.asarray(shifts, np.float32)):
        yield "its zero point is not 0: the parser takes symmetric quantization only"
    steps = read(scale)
    if steps is not None:
        steps = np.asarray(steps, np.float32)
        wrong = steps[~(np.isfinite(steps) & (steps > 0))]
        if wrong.size:
            yield f"a scale is {wrong.min():g}; all must be finite and above 0"
    yield from find_block_faults(node, data, scale)


def find_block_faults(node: ir.Node, data: ir.Value | None, scale: ir.Value | None) -> Iterator[str]:
    """Yield in words which blocks do not divide their axis, or have another number of scales."""
    size = node.attributes.get_int("block_size", 0)
    axis = node.attributes.get_int("axis", 1)
    length = find_length(data, axis)
    if not size or length is None:
        return
    if size < 0 or length % size:
        yield f"its blocks of {size} do not divide the {length} values of axis {axis}"
    elif (count := find_length(scale, axis)) not in (None, length // size):
        yield f"it has {count} scales for {length // size} blocks of axis {axis}"


def find_length(value: ir.Value | None, axis: int) -> int | None:
    """Return the length of a value's axis; None where it is not fixed, or not known."""
    shape = None if value is None else value.shape
    if shape is None or not -len(shape) <= axis < len(shape):
        return None
    length = shape[axis]
    return length if isinstance(length, int) else None
