"""Computes DequantizeLinear of int4, fp8 and fp4, which ONNX Runtime does not take from Python.

See https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...runtime.backends.backend import Array
from ...runtime.errors import BackendError

OPERATOR = "DequantizeLinear"


def is_of_small_type(node: ir.Node, codes: Array | None) -> bool:
    """Tell whether a node dequantizes a type that NumPy itself does not have."""
    return node.op_type == OPERATOR and codes is not None and codes.dtype.kind == "V"


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
