"""The form of QuantizeLinear and DequantizeLinear that TensorRT computes, and what is wrong with another.

See https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    yield from find_scale_faults(node, data, scale)


def find_scale_faults(node: ir.Node, data: ir.Value | None, scale: ir.Value | None) -> Iterator[str]:
    """Yield in words which blocks do not divide their axis, or how the number of scales is wrong.

    There is one scale for all values, for each index of the axis, or for each block of the axis.
    """
    shape = find_shape(data)
    scales = None if scale is None or scale.shape is None else tuple(scale.shape)
    size = node.attributes.get_int("block_size", 0)
    if shape is None or (not size and scales in (None, (), (1,))):
        return
    axis = node.attributes.get_int("axis", 1)
    if not -len(shape) <= axis < len(shape):
        yield f"its axis {axis} is none of a tensor of {len(shape)} axes"
        return
    length = shape[axis]
    if size and isinstance(length, int) and (size < 0 or length % size):
        yield f"its blocks of {size} do not divide the {length} values of axis {axis}"
        return
    wanted = [length]
    if size:
        wanted = list(shape)
        wanted[axis] = length // size if isinstance(length, int) else None
    if scales is None or do_shapes_agree(scales, wanted):
        return
    each = f"block of {size} along" if size else "index of"
    yield (
        f"it has {describe_scales(scales)}, and must have {describe_shape(wanted)}: one for each {each}"
        f" axis {axis}"
    )


def do_shapes_agree(found: Sequence[object], wanted: Sequence[object]) -> bool:
    """Tell whether two shapes have as many axes, and one length where both are fixed."""
    return len(found) == len(wanted) and all(
        one == other or not isinstance(one, int) or not isinstance(other, int)
        for one, other in zip(found, wanted, strict=True)
    )


def describe_shape(shape: Sequence[object]) -> str:
    """Return a shape in words, with a question mark for a length that is not fixed: 2 x ?."""
    return " x ".join(str(one) if isinstance(one, int) else "?" for one in shape)


def describe_scales(shape: Sequence[object]) -> str:
    """Return the number of scales in words: 2 x 64 scales."""
    return f"{describe_shape(shape)} scales" if tuple(shape) not in ((), (1,)) else "a single scale"


def find_shape(data: ir.Value | None) -> tuple[object, ...] | None:
    """Return a value's shape; of codes without one that of what was quantized; None where it is not known."""
    if data is not None and data.shape is None:
        producer = data.producer()
        data = producer.inputs[0] if producer is not None and producer.op_type == QUANTIZES else None
    return None if data is None or data.shape is None else tuple(data.shape)
