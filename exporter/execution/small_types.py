"""Computes DequantizeLinear of int4, fp8 and fp4, which ONNX Runtime does not take from Python, and back.

See https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html, and QuantizeLinear beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ...runtime.backends.backend import Array
from ...runtime.errors import BackendError

OPERATOR = "DequantizeLinear"
QUANTIZE = "QuantizeLinear"


def is_of_small_type(node: ir.Node, codes: Array | None) -> bool:
    """Tell whether a node dequantizes a type that NumPy itself does not have."""
    return node.op_type == OPERATOR and codes is not None and codes.dtype.kind == "V"


def gives_small_type(node: ir.Node, zeros: Array | None) -> bool:
    """Tell whether a node quantizes to a type that NumPy itself does not have; that of its zero points."""
    return node.op_type == QUANTIZE and not node.domain and zeros is not None and zeros.dtype.kind == "V"


def quantize(node: ir.Node, x: Array, step: Array, zeros: Array) -> Array:
    """Return codes of fp8 in steps of one scale; what is beyond the largest code becomes that code."""
    import ml_dtypes

    info: Any = ml_dtypes.finfo(zeros.dtype)  # type: ignore[no-untyped-call]
    if step.ndim or zeros.astype(np.float32).any():
        raise BackendError(f"node {node.name!r} ({QUANTIZE}) has several steps or zero points")
    top = float(info.max)
    with np.errstate(divide="ignore", invalid="ignore"):  # a damaged graph may have a step of zero
        codes = np.clip(x.astype(np.float32) / step.astype(np.float32), -top, top)
    return np.asarray(codes.astype(zeros.dtype))


def dequantize(node: ir.Node, codes: Array, scale: Array, zeros: Array | None = None) -> Array:
    """Return codes times their scales, in the scales' type.

    There is one scale for all codes, for each index of the axis, or for each block of the axis.
    """
    if zeros is not None and zeros.astype(np.float32).any():
        raise BackendError(f"node {node.name!r} ({OPERATOR}) has zero points, which are not supported here")
    axis = node.attributes.get_int("axis", 1)
    if size := node.attributes.get_int("block_size", 0):
        scale = np.repeat(scale, size, axis)
    elif scale.ndim:
        scale = scale.reshape([-1 if place == axis % codes.ndim else 1 for place in range(codes.ndim)])
    values = codes.astype(np.float32) * scale.astype(np.float32)
    return np.asarray(values, scale.dtype)
