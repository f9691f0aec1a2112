"""The words that `planforge run` finds near others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from .console import emit

if TYPE_CHECKING:
    from ...words.word_vectors import WordVectors
    from .run_input import TextSource


DEFAULT_NEIGHBOURS = 10


def find_neighbours(
    model: WordVectors, source: TextSource, options: Mapping[str, Any], as_json: bool
) -> None:
    """Print the words nearest to each word, or to the sum of all words.

    Args:
        model: finds them.
        source: the words.
        options: "negative", words that are taken away from the sum of the others; "together", to ask for the
            sum without such words; and "top_k", how many neighbours to print.
        as_json: print a JSON line for each question.
    """
    words = []
    for item in source.read_items():
        if item is None:
            continue
        if not isinstance(item, str):
            raise InputError("word vectors take words, not pairs of texts")
        words.append(item)
    negative = options.get("negative", [])
    adds = bool(negative) or options.get("together", False)
    questions = [words] if adds else [[word] for word in words]
    k = options.get("top_k", DEFAULT_NEIGHBOURS)
    for question in questions:
        found = model.analogy(question, negative, k)
        if as_json:
            shown = {"positive": question, "negative": negative}
            neighbours = [neighbour._asdict() for neighbour in found]
            emit(json.dumps({**shown, "neighbours": neighbours}, ensure_ascii=False))
            continue
        if len(questions) > 1:
            emit(f"{question[0]}:")
        for neighbour in found:
            emit(f"{neighbour.similarity:.4f}  {neighbour.word}")
