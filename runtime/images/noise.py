"""Normal noise as PyTorch's generator of the CPU draws it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..option_checks import check_whole

Float32: TypeAlias = npt.NDArray[np.float32]
BLOCK = 16  # PyTorch makes so many normal numbers at once, of fewer each by itself
CHUNK = 1 << 14  # whole blocks, few enough that their arrays stay in a core's cache


class Generator:
    """Draws what a seeded torch.Generator draws, so that a seed gives the picture that it gives in diffusers.

    Both are Mersenne Twisters, whose bits are equal; numpy has frozen those of its RandomState. The normal
    numbers differ by rounding, as PyTorch's own do from one processor to another.

    Args:
        seed: from 0 to 2**64 - 1, of which PyTorch reads the lowest 32 bits only.
    """

    def __init__(self, seed: int) -> None:
        check_whole("seed", seed, 0, 2**64 - 1)
        self.twister = np.random.RandomState(seed & 0xFFFFFFFF)
        self.kept: float | None = None  # the second of a pair of single numbers, for the next call

    def normal(self, shape: Sequence[int]) -> Float32:
        """Return float32 numbers of mean 0 and deviation 1, which continue those of earlier calls."""
        count = math.prod(shape)
        if count < BLOCK:
            return np.array([self.draw_single() for _ in range(count)], np.float32).reshape(shape)
        values = np.empty(count, np.float32)
        for begin in range(0, count, CHUNK):
            blocks = make_normal(self.draw_bits(min(CHUNK, count - begin)))
            values[begin : begin + len(blocks)] = blocks
        if count % BLOCK:  # the last block is drawn anew, over numbers of the one before
            values[-BLOCK:] = make_normal(self.draw_bits(BLOCK))
        return values.reshape(shape)

    def draw_bits(self, count: int) -> npt.NDArray[np.uint32]:
        return self.twister.randint(0, 2**32, size=count, dtype=np.uint32)

    def draw_single(self) -> float:
        """Return one normal number, made in float64: every second call returns what the first has kept."""
        if self.kept is not None:
            value, self.kept = self.kept, None
            return value
        high, low, second_high, second_low = map(int, self.draw_bits(4))
        turn = make_fraction(high, low)
        radius = math.sqrt(-2 * math.log1p(-make_fraction(second_high, second_low)))
        self.kept = radius * math.sin(2 * math.pi * turn)
        return radius * math.cos(2 * math.pi * turn)


def make_normal(bits: npt.NDArray[np.uint32]) -> Float32:
    """Return the normal numbers of the whole blocks of random bits (Box-Muller).

    In a block the first eight numbers give the radius, the last eight the angle.
    """
    whole = len(bits) - len(bits) % BLOCK
    uniform: Float32 = (bits[:whole] & np.uint32((1 << 24) - 1)).astype(np.float32) * np.float32(2**-24)
    blocks = uniform.reshape(-1, 2, BLOCK // 2)
    radius = np.sqrt(np.float32(-2) * np.log(np.float32(1) - blocks[:, 0]))
    angle = np.float32(2 * np.pi) * blocks[:, 1]
    blocks[:, 0] = radius * np.cos(angle)
    blocks[:, 1] = radius * np.sin(angle)
    return uniform


def make_fraction(high: int, low: int) -> float:
    """Return the lowest 53 of 64 bits as a fraction of 1."""
    return float((high << 32 | low) & (1 << 53) - 1) * 2.0**-53
