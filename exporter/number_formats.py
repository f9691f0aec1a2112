"""The number formats of quantized weights: which codes and which scales there are.

A value is a code times the scale of its block. N rows of a weight (its outputs), K columns (its inputs), b
columns in a block
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..runtime.bundle.artifact import PAIR_TOP

Array = npt.NDArray[np.float32]
Codes = npt.NDArray[Any]

FP32_DIGITS = 24
FP16_DIGITS = 11
FP8_DIGITS = 4
SMALLEST_HALF = 2.0**-24  # above 0 in fp16
LARGEST_HALF = 65504.0
FP8_MAX = 448.0
SMALLEST_FP8 = 2.0**-6  # with all its digits


@dataclass(frozen=True)
class NumberFormat:
    """A format of codes and of their scales.

    Attributes:
        name: by which files and messages call it.
        element_type: of codes in ONNX's own operators, by ONNX's number.
        opset: the first in which DequantizeLinear takes such codes, in blocks or by column.
        bits: of a code in a file.
        low: the lowest code.
        top: the highest code.
        block_sizes: how many columns may share a scale, the largest first; 0 stands for all of a row.
        clips: scales that are tried, as shares of the one by which a block's largest value is the top code;
            the one of least squared error is taken. Below 1 values are clipped, which can round the rest
            better.
        scale_digits: binary digits of a scale. Scales in fp32 have the sign of the block's largest value.
        float_type: the type of a code that is no integer, by the name of ml_dtypes.
        uses_gptq: whether its codes are so few that GPTQ is worth its time.
        shares_unit: whether scales are fp8 numbers times a power of two, the unit of all scales of a weight.
        pair_top: the most that the codes of columns 0 and 1, 2 and 3, ... of a row may add up to.
        damping: what GPTQ adds to the diagonal of x^T x, as a share of its mean; by default as published.
    """

    name: str
    element_type: int
    opset: int
    bits: int
    low: float
    top: float
    block_sizes: tuple[int, ...]
    clips: tuple[float, ...] = (1.0,)
    scale_digits: int = FP32_DIGITS
    float_type: str = ""
    uses_gptq: bool = False
    shares_unit: bool = False
    pair_top: int | None = None
    damping: float = 0.01

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return NumPy's type of a code; int4 is kept in int8, as arithmetic needs it."""
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, self.float_type) if self.float_type else np.int8)

    @property
    def is_positive(self) -> bool:
        """Return whether scales are positive, as TensorRT needs them."""
        return self.scale_digits < FP32_DIGITS

    def choose_block(self, width: int, size: int) -> int:
        """Return how many of a row's columns share a scale where most weights have blocks of `size`."""
        return width if self.block_sizes == (0,) else size

    def round(self, x: Array) -> Codes:
        """Return the nearest codes of values in units of their scales; of two equally near the even one."""
        return self.snap(x, np.empty_like(x)).astype(self.dtype)

    def snap(self, x: Array, out: Array) -> Array:
        """Write the values of the nearest codes to `out`, and return it."""
        np.clip(x, self.low, self.top, out=out)
        if not self.float_type:
            return np.rint(out, out=out)
        out[...] = out.astype(self.dtype)
        return out

    def find_row_scales(self, weight: Array) -> Array:
        """Return the scale (N, 1) by which no code of a row (N, K) exceeds the format."""
        reach = np.maximum(np.abs(weight).max(axis=1, keepdims=True), 1e-12) / self.top
        if self.pair_top is not None:
            reach = np.maximum(reach, sum_pairs(weight).max(axis=1, keepdims=True) / self.pair_top)
        return self.round_scales(np.asarray(reach, np.float32))

    def round_pairs(self, x: Array) -> Codes:
        """Return the nearest codes of rows (N, K) in units of their scales; those of a pair fit together."""
        codes = self.round(x)
        if self.pair_top is not None:
            end = x.shape[1] // 2 * 2
            codes[:, 1:end:2] = self.round_beside(x[:, 1:end:2], codes[:, 0:end:2])
        return codes

    def round_beside(self, x: Array, others: Codes) -> Codes:
        """Return the nearest codes that leave room for the codes of the other columns of their pairs."""
        if self.pair_top is None:
            return self.round(x)
        room = self.pair_top - np.abs(others.astype(np.float32))
        low = np.where(others < 0, -room, self.low)
        high = np.where(others > 0, room, self.top)
        return self.round(np.clip(x, low, high))

    def measure_gaps(self, x: Array) -> Array:
        """Return the distance of the two codes that enclose each value, in units of its scale."""
        import ml_dtypes

        if not self.float_type:
            return np.ones_like(x)
        info: Any = ml_dtypes.finfo(self.dtype)  # type: ignore[no-untyped-call]
        _, exponent = np.frexp(np.maximum(np.abs(x), 2.0**info.minexp))  # of twice the power of two below
        return np.asarray(np.ldexp(np.float32(1), exponent - 1 - info.nmant))

    def find_reach(self, blocks: Array) -> Array:
        """Return the value (N, K / b) of each block (N, K / b, b) that becomes the top code at clip 1."""
        extremes = find_extremes(blocks)
        if self.is_positive:
            return np.abs(extremes)
        # In int4 the extreme itself becomes -8.
        return np.asarray(extremes * np.float32(1 if self.low == -self.top else self.top / self.low))

    def list_scales(self, blocks: Array) -> Array:
        """Return the scales (C, N, K / b) of blocks (N, K / b, b) at each of C clips, rounded."""
        reach = self.find_reach(blocks)
        return self.round_scales(np.stack([reach * np.float32(clip / self.top) for clip in self.clips]))

    def round_scales(self, scale: Array) -> Array:
        """Return the nearest scales of so many digits, none of them zero or beyond fp16."""
        if self.scale_digits == FP32_DIGITS:
            return scale
        if self.scale_digits < FP16_DIGITS:
            fraction, exponent = np.frexp(scale)
            steps = np.rint(fraction * 2.0**self.scale_digits)
            scale = np.ldexp(steps, exponent - self.scale_digits).astype(np.float32)
        return np.asarray(np.clip(scale, SMALLEST_HALF, LARGEST_HALF).astype(np.float16), np.float32)

    def find_smallest_scale(self, scale: Array) -> float:
        """Return the smallest scale that can stand beside a weight's scales."""
        return find_unit(scale) * SMALLEST_FP8 if self.shares_unit else SMALLEST_HALF


def sum_pairs(weight: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return |a + b| (N, K / 2) of each pair of columns (N, K) whose signs are equal, else 0."""
    end = weight.shape[1] // 2 * 2
    first = weight[:, 0:end:2]
    second = weight[:, 1:end:2]
    sums: npt.NDArray[Any] = np.abs(first + second) * ((first < 0) == (second < 0))
    return sums


def find_unit(scale: Array) -> float:
    """Return the least power of two by which a weight's scales, divided, are within fp8's range."""
    _, exponent = np.frexp(np.float64(scale.max()) / FP8_MAX * (1 - 2.0**-30))  # of 448 itself it is 1
    return float(np.ldexp(1.0, max(int(exponent), -18)))  # such that fp16 holds the smallest


def find_extremes(blocks: Array) -> Array:
    """Return the value of the largest magnitude (N, K / b) of each block (N, K / b, b); never zero."""
    where = np.abs(blocks).argmax(-1)[..., None]
    found: Array = np.take_along_axis(blocks, where, -1)[..., 0]
    return np.where(found == 0, np.finfo(np.float32).tiny, found)


CPU_SIZES = (256, 128, 64, 32)
# With 8 / 7 the extreme of int4 becomes -7, so that its opposite is there too.
INT4_CLIPS = (8 / 7, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
# With 1.5 the extreme of fp4 becomes 4, which spares the wide gap below 6.
FP4_CLIPS = (1.5, 1.25, 1.0, 0.9, 0.8)

INT8 = NumberFormat("int8", 3, 13, 8, -127, 127, CPU_SIZES)
INT4 = NumberFormat("int4", 22, 21, 4, -8, 7, CPU_SIZES, INT4_CLIPS, uses_gptq=True)
# With the published damping weights fit the calibration's texts more closely than others: all-MiniLM-L6-v2
# loses 1.02e-3 of a cosine on the Bible instead of 0.87e-3.
ROW_INT8 = replace(INT8, pair_top=PAIR_TOP, damping=0.1)
PLAN_INT8 = replace(INT8, block_sizes=(0,), scale_digits=FP16_DIGITS)
PLAN_INT4 = replace(INT4, block_sizes=(128, 64, 32), scale_digits=FP16_DIGITS)
FP8 = NumberFormat(
    "fp8",
    17,
    19,
    8,
    -FP8_MAX,
    FP8_MAX,
    (0,),
    scale_digits=FP16_DIGITS,
    float_type="float8_e4m3fn",
    uses_gptq=True,
)
NVFP4 = NumberFormat(
    "nvfp4",
    23,
    23,
    4,
    -6,
    6,
    (16,),
    FP4_CLIPS,
    FP8_DIGITS,
    float_type="float4_e2m1fn",
    uses_gptq=True,
    shares_unit=True,
)

# By the bits of a code: a weight that loses too much in 4 bits has 8.
NumberFormats = Mapping[int, NumberFormat]
CPU_INTEGERS: NumberFormats = {8: INT8, 4: INT4}
PLAN_INTEGERS: NumberFormats = {8: PLAN_INT8, 4: PLAN_INT4}
PLAN_FLOATS: NumberFormats = {8: FP8, 4: NVFP4}
