"""The reference for blocks of int8 and int4: numpy, by what ONNX Runtime documents of its operators.

N rows of a weight, K columns, b columns of a block
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from planforge.exporter.passes import store_blocks
from planforge.exporter.passes.quantize import QuantizedWeights

Array: TypeAlias = npt.NDArray[np.float32]

RANGE = {8: (-127, 127), 4: (-8, 7)}  # of int8 and int4; of int4 one more on one side counts


def by_block(weight: Array, size: int) -> npt.NDArray[np.float64]:
    """(N, K) as (N, K / b, b)."""
    return weight.astype(np.float64).reshape(len(weight), -1, size)


def unpacked(packed: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int64]:
    """(N, K / b, b) of MatMulNBits' (N, K / b, bytes), as its documentation describes them.

    "The first 4 bits are stored in the lower 4 bits of a byte, and the second 4 bits are stored in the
    higher 4 bits"; "a default zero point is used: 2^(bits - 1)".
    """
    found = np.zeros((*packed.shape[:-1], packed.shape[-1] * 8 // bits), np.int64)
    if bits == 8:
        found[:] = packed
    else:
        found[..., 0::2] = packed % 16
        found[..., 1::2] = packed // 16
    found -= 2 ** (bits - 1)
    return found


def dequantized(packed: npt.NDArray[np.uint8], scale: Array, bits: int) -> Array:
    """(N, K) by "dequantized_weight = (quantized_weight - zero_point) * scale"."""
    numbers = unpacked(packed.reshape(*scale.shape, -1), bits).astype(np.float32)
    return (numbers * scale[..., None]).reshape(len(scale), -1)


def quantize_weights(model: ir.Model, bits: int, size: int) -> None:
    """Store a graph's weights in blocks, each rounded as it is."""
    store_blocks.store(model, QuantizedWeights(bits, size, {}, {}))
