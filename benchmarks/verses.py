"""Verses of the King James Bible as documents, and words of them as queries: data to train and judge search.

Books that `models.demos.bible` holds out are never trained on; queries are made of their verses alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planforge.models.demos.bible import HELD_OUT, parse_books, read_bible

WORD = re.compile(r"[A-Za-z']{4,}")  # that a query may have: "the", "and" and their like say nothing
FEWEST = 3  # words of a query
SHARE = 3  # a query has one in three of its verse's words
LEAST_WORDS = 8  # of a verse that queries are made of


@dataclass(frozen=True)
class Corpus:
    """Documents by their verses' names, queries with the documents that they are of, and texts to train on.

    Attributes:
        documents: verses of the held-out books, then of others; no text is there twice.
        queries: words of a held-out verse.
        wanted: for each query the number of its verse among the documents.
        training: verses of the other books.
    """

    documents: dict[str, str]
    queries: list[str]
    wanted: npt.NDArray[np.int64]
    training: list[str]

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return list(self.documents.values())


def read_verses() -> tuple[dict[str, str], dict[str, str]]:
    """Return the verses to train on and those held out, by names such as "Ge 6:14"; each text once."""
    training: dict[str, str] = {}
    held_out: dict[str, str] = {}
    seen: set[str] = set()
    for book, chapters in parse_books(read_bible()).items():
        verses = held_out if book in HELD_OUT else training
        for chapter, texts in enumerate(chapters, 1):
            for number, text in enumerate(texts, 1):
                if text not in seen:
                    seen.add(text)
                    verses[f"{book} {chapter}:{number}"] = text
    return training, held_out


def make_corpus(documents: int, queries: int) -> Corpus:
    """Return so many documents, held-out verses first, and queries of held-out ones among them."""
    training, held_out = read_verses()
    random = np.random.default_rng(0)
    names = [*random.permutation(list(held_out)).tolist(), *random.permutation(list(training)).tolist()]
    both = held_out | training
    chosen = {name: both[name] for name in names[:documents]}
    texts = list(chosen.values())
    long = [
        place for place, text in enumerate(texts[: len(held_out)]) if len(WORD.findall(text)) >= LEAST_WORDS
    ]
    wanted = np.sort(random.choice(long, queries, replace=False))
    asked = [sample_words(texts[place], random) for place in wanted]
    return Corpus(chosen, asked, wanted, list(training.values()))


def sample_words(text: str, random: np.random.Generator) -> str:
    """Return a third of a verse's longer words, three of them if it has so many, in their order."""
    words = WORD.findall(text)
    count = min(len(words), max(FEWEST, len(words) // SHARE))
    places = np.sort(random.choice(len(words), count, replace=False))
    return " ".join(words[place] for place in places)


def rank_documents(scores: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Return the numbers of the best documents of each query (Q, count) by scores (Q, N), the best first."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def measure_recall(best: npt.NDArray[np.int64], wanted: Sequence[int] | npt.NDArray[np.int64]) -> float:
    """Return the share of queries (Q, count) whose own verse is among their best documents."""
    return float((best == np.asarray(wanted)[:, None]).any(axis=1).mean())
