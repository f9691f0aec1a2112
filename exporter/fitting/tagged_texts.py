"""Words with a tag each: their table, their features, and the tags that a graph gives them.

N words, T tokens, F features
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...runtime import TextEncoder
from ...runtime.apps.batch.text_table import read_text_table
from ...runtime.apps.check.case import Text
from ...runtime.apps.check.encoder import make_piece
from ...runtime.backends.backend import Array
from ...runtime.errors import DataError
from ..tasks.fitted_head import TAGS
from ..tensorrt.plans import Progress
from .labelled_texts import Table


@dataclass(frozen=True)
class Words:
    """The words of texts that the model reads, each with the place of its first token.

    Attributes:
        features: (N, F) of the first tokens.
        labels: N tags.
        texts: (N,) the number of each word's text.
        places: (N,) of the first token, special tokens counted.
        tokens: of each text the ids that the model reads.
    """

    features: Array
    labels: tuple[str, ...]
    texts: Array
    places: Array
    tokens: tuple[tuple[int, ...], ...]


def read_tagged_table(path: Path) -> Table:
    """Read the columns "text" and "labels": words and as many tags, both with spaces between.

    Raises:
        InputError: the file is of another kind, cannot be read, or lacks a column.
        DataError: a row lacks a text, or has another number of tags than of words; the row is named.
    """
    table = read_text_table(path, ("text", "labels"))
    labels = table.columns["labels"]
    for number, (text, tags) in enumerate(zip(table.columns["text"], labels, strict=True)):
        words = len(text.split())
        count = len(tags.split())
        if words != count:
            raise DataError(
                f"{table.find_place(number)} has {words} words and {count} labels; each word has one"
            )
    known = {tag for tags in labels for tag in tags.split()}
    if len(known) < 2:
        raise DataError(f"{path} has {len(known)} label; a tagger needs two classes or more")
    return Table(table.columns["text"], labels, table.lines)


def read_words(encoder: TextEncoder, table: Table, layers: str, progress: Progress) -> Words:
    """Compute the features of each word's first token; words behind the longest text are left out."""
    options: dict[str, Any] = {
        "layers": layers,
        "truncation": "head",
        "progress": lambda done: progress(f"computing features: {done} of {len(table.texts)} texts"),
    }
    special = encoder.defaults.make_special_tokens()
    found = encoder.iterate("features", table.texts, **options)
    vectors: list[Array] = []
    labels: list[str] = []
    places: list[tuple[int, int]] = []
    tokens: list[tuple[int, ...]] = []
    for number, (text, tags, result) in enumerate(zip(table.texts, table.labels, found, strict=True)):
        own = len(result.tokens) - len(special.prefix) - len(special.suffix)  # truncation keeps the first
        ids = encoder.tokenizer.encode(text)[:own]
        tokens.append((*special.prefix, *ids, *special.suffix))
        for tag, place in zip(tags.split(), find_first_tokens(text, result.offsets), strict=True):
            if place is not None:
                vectors.append(result.vectors[place])
                labels.append(tag)
                places.append((number, place))
    texts, first = np.array(places).T
    return Words(np.stack(vectors), tuple(labels), texts, first, tuple(tokens))


def find_first_tokens(text: str, offsets: tuple[tuple[int, int], ...]) -> list[int | None]:
    """Return the place of each word's first token; None of a word that has none or is not read."""
    first: list[int | None] = []
    for word in re.finditer(r"\S+", text):
        inside = (t for t, (start, end) in enumerate(offsets) if word.start() <= start < min(end, word.end()))
        first.append(next(inside, None))
    return first


def predict_words(folder: Path, words: Words, chosen: Array) -> Array:
    """Return the likeliest tag of some words, by number, as the graph of a bundle computes it."""
    predicted = np.empty(len(chosen), np.int64)
    with TextEncoder.load(folder) as encoder:
        for text in np.unique(words.texts[chosen]):
            piece = make_piece(Text(words.tokens[text]))
            ((logits,),) = encoder.encoder.run_batch([piece], [TAGS])
            own = words.texts[chosen] == text
            predicted[own] = logits[words.places[chosen][own]].argmax(-1)
    return predicted
