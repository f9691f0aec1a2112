"""The settings of a bundle of word vectors, as its manifest records them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .json_reader import Reader


@dataclass(frozen=True)
class WordDefaults:
    """How a model of word vectors is asked.

    Attributes:
        max_length: the most words of a question.
        unknown: the id of the vector that stands for words without one; None where there is none.
    """

    max_length: int
    unknown: int | None = None

    @staticmethod
    def from_json(value: Any) -> WordDefaults:
        r = Reader(value, "words")
        return WordDefaults(r.get("max_length", int), r.get("unknown", int, None))
