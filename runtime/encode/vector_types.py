"""Vectors of texts in fewer bytes: int8 by each number's range, or a bit for each number's sign.

N texts, E width of a vector
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.backend import Array

TYPES = ("float32", "int8", "uint8", "binary", "ubinary")
LEVELS = 255  # steps of a number's range


def quantize_vectors(vectors: Array, precision: str, ranges: Array | None) -> npt.NDArray[Any]:
    """Return vectors (E,) or (N, E) in one of `TYPES`, as sentence-transformers' quantize_embeddings does.

    Args:
        vectors: float32.
        precision: the type; of "binary" and "ubinary" eight numbers' signs are one byte, (N, E / 8).
        ranges: the lowest and the highest value of each number, (2, E), which int8 and uint8 need. What lies
            beyond is cut.
    """
    if precision == "float32":
        return vectors
    if precision in ("binary", "ubinary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    assert ranges is not None
    steps = (ranges[1] - ranges[0]) / LEVELS
    steps = np.where(steps == 0, np.float32(1), steps)
    levels = np.clip(np.floor((vectors - ranges[0]) / steps), 0, LEVELS)
    if precision == "uint8":
        return levels.astype(np.uint8)  # type: ignore[no-any-return]
    return (levels - 128).astype(np.int8)  # type: ignore[no-any-return]
