"""Computes DequantizeLinear of int4, fp8 and fp4, and QuantizeLinear to fp8.

ONNX Runtime does not take these types from Python. See https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ...runtime.backends.backend import Array
from ...runtime.errors import BackendError
from ..number_formats import FP8

OPERATOR = "DequantizeLinear"
QUANTIZE = "QuantizeLinear"


def is_of_small_type(node: ir.Node, codes: Array | None) -> bool:
    """Tell whether a node dequantizes a type that NumPy itself does not have."""
    return node.op_type == OPERATOR and codes is not None and codes.dtype.kind == "V"


def dequantize(node: ir.Node, codes: Array, scale: Array, zeros: Array | None = None) -> Array:
    """Return codes times their scales, in the scales' type.

    There is one scale for all codes, for each index of the axis, or for each block of the axis.
    """
    if zeros is not None and zeros.astype(np.float32).any():
        raise BackendError(f"node {node.name!r} ({OPERATOR}) has zero points, which are not supported here")
    values = codes.astype(np.float32) * spread(node, scale, codes.ndim).astype(np.float32)
    return np.asarray(values, scale.dtype)


def is_to_fp8(node: ir.Node, zeros: Array | None) -> bool:
    """Tell whether a node quantizes to fp8, by its zero point."""
    return node.op_type == QUANTIZE and zeros is not None and zeros.dtype.name == FP8.float_type


def quantize(node: ir.Node, x: Array, scale: Array, zeros: Array) -> Array:
    """Return the fp8 numbers nearest to values divided by their scales, those beyond its range clipped."""
    import ml_dtypes

    if zeros.astype(np.float32).any():
        what = f"node {node.name!r} ({node.op_type})"
        raise BackendError(f"{what} has zero points, which are not supported here")
    info: Any = ml_dtypes.finfo(zeros.dtype)  # type: ignore[no-untyped-call]
    top = float(info.max)
    with np.errstate(divide="ignore", invalid="ignore"):  # a damaged graph may have a scale of zero
        shares = x.astype(np.float32) / spread(node, scale, x.ndim).astype(np.float32)
    return np.asarray(np.clip(shares, -top, top).astype(zeros.dtype))


def spread(node: ir.Node, scale: Array, axes: int) -> Array:
    """Return scales in a shape that broadcasts with what they scale, of so many axes."""
    axis = node.attributes.get_int("axis", 1)
    if size := node.attributes.get_int("block_size", 0):
        return np.repeat(scale, size, axis)
    if not scale.ndim:
        return scale
    return scale.reshape([-1 if place == axis % axes else 1 for place in range(axes)])
