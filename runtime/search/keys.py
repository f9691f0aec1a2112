"""What finds the rows of an index that are nearest to chunks: each kind of keys has a file of its own.

R rows of an index, m tokens of a row, Q chunks that are looked for
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Chunk = Sequence[int]


class Nearest(NamedTuple):
    """The rows that are nearest to one chunk, the nearest first; of equal ones the first of the index.

    Attributes:
        rows: int64.
        cosines: of their keys and the chunk's, float64.
    """

    rows: npt.NDArray[np.int64]
    cosines: npt.NDArray[np.float64]


class EngineOptions(NamedTuple):
    """Where and with how many threads an index computes; `LoadOptions` says what they mean."""

    backend: str = "auto"
    device: int = 0
    threads: int | None = None


class Keys(Protocol):
    """The keys of an index: `compute` makes those of chunks, and `search` finds the nearest of the index."""

    def compute(self, chunks: Sequence[Chunk]) -> Any:
        """Return the keys of chunks, as `search` takes them."""
        ...

    def search(self, queries: Any, number: int, skipped: npt.NDArray[np.bool_]) -> list[Nearest]:
        """Return for each key the `number` nearest rows, or all there are, without the skipped ones (R,)."""
        ...

    def close(self) -> None:
        """Let go of files and models."""
        ...


def choose_nearest(
    cosines: npt.NDArray[np.floating[Any]], number: int, skipped: npt.NDArray[np.bool_]
) -> Nearest:
    """Return the largest of the cosines (R,), which are overwritten where they are skipped."""
    cosines[skipped] = -np.inf
    kept = np.arange(len(cosines))
    if number < len(cosines):
        least = np.partition(cosines, len(cosines) - number)[len(cosines) - number]
        kept = np.flatnonzero(cosines >= least)
    order = np.argsort(-cosines[kept], kind="stable")[:number]
    rows = kept[order]
    rows = rows[cosines[rows] > -np.inf]
    return Nearest(rows, cosines[rows].astype(np.float64))
