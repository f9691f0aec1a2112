"""The settings of a bundle that reads neighbours of its text, as its manifest records them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ManifestError
from .json_reader import FILE_NAME, Reader

MAX_LENGTH = 2**16  # of a chunk and of a neighbour, in a bundle and in an index


@dataclass(frozen=True)
class RetrievalDefaults:
    """What is read beside a text.

    Attributes:
        chunk_length: tokens of a chunk, at whose end neighbours are looked up.
        neighbours: how many are read of a chunk.
        neighbour_length: the most tokens of one: a chunk and what follows it.
    """

    chunk_length: int
    neighbours: int
    neighbour_length: int

    @property
    def read_length(self) -> int:
        """Return how many tokens all neighbours of a chunk have, padding included."""
        return self.neighbours * self.neighbour_length

    @staticmethod
    def from_json(value: Any) -> RetrievalDefaults:
        r = Reader(value, "retrieval")
        least = {"chunk_length": 2, "neighbours": 1, "neighbour_length": 1}
        found = {name: r.get(name, int) for name in least}
        for name, number in found.items():
            if not least[name] <= number <= MAX_LENGTH:
                raise ManifestError(
                    f"{FILE_NAME}: retrieval.{name} is {number}; it must be from {least[name]} to"
                    f" {MAX_LENGTH}"
                )
        return RetrievalDefaults(**found)
