"""Texts for indexes, and the nearest chunks of an index as scikit-learn finds them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer
from sklearn.metrics.pairwise import cosine_similarity

from planforge.runtime.search.build import IndexCounts, Texts, build_index
from planforge.runtime.search.neighbour_index import NeighbourIndex
from planforge.runtime.text.tokenizer import Tokenizer

from .paths import DEMOS

M = 16  # tokens of a chunk
LENGTH = 32  # of a neighbour
FILE = DEMOS / "gpt2-demo" / "tokenizer.json"
HASH = hashlib.sha256(FILE.read_bytes()).hexdigest()
WORDS = [
    *(
        "and",
        "the",
        "of",
        "that",
        "to",
        "in",
        "he",
        "shall",
        "for",
        "unto",
        "his",
        "LORD",
        "they",
        "be",
        "is",
    ),
    *(
        "with",
        "not",
        "all",
        "thou",
        "thy",
        "was",
        "it",
        "God",
        "which",
        "my",
        "people",
        "king",
        "son",
        "house",
    ),
    *("man", "day", "land", "came", "David", "children", "hand", "earth", "heaven", "sea", "water", "light"),
    *("garden", "tree", "fruit", "serpent", "stone", "river", "mountain", "bread", "wine", "sheep", "word"),
]


@cache
def make_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(FILE)


def make_text(seed: int, words: int) -> str:
    """Random words, of which the first ones come most often."""
    draws = np.random.default_rng(seed).zipf(1.3, words) % len(WORDS)
    return " ".join(WORDS[draw] for draw in draws)


def make_texts() -> dict[str, str]:
    """Ten texts of many lengths; one has less than a chunk, and one less than half of one."""
    texts = {f"{seed}.txt": make_text(seed, 150 + 37 * seed) for seed in range(8)}
    return texts | {"short.txt": make_text(50, 12), "tiny.txt": "Amen."}


def make_index(folder: Path, texts: Texts | None = None, **options: Any) -> IndexCounts:
    settings: dict[str, Any] = {"chunk_length": M, "neighbour_length": LENGTH} | options
    return build_index(
        make_texts() if texts is None else texts,
        folder,
        tokenizer=make_tokenizer(),
        tokenizer_hash=HASH,
        **settings,
    )


def open_index(folder: Path, **options: Any) -> NeighbourIndex:
    settings: dict[str, Any] = {"chunk_length": M, "neighbour_length": LENGTH} | options
    return NeighbourIndex.open(folder, make_tokenizer(), settings.pop("tokenizer_hash", HASH), **settings)


def list_chunks(texts: Mapping[str, str]) -> list[tuple[str, int, list[int]]]:
    """The name, the first token and the ids of every chunk, by the issue's words."""
    chunks = []
    for name, text in texts.items():
        ids = make_tokenizer().encode(text)
        for start in range(0, len(ids), M):
            if len(ids) - start >= M / 2:
                chunks.append((name, start, ids[start : start + M]))
    return chunks


def measure_cosines(
    chunks: Sequence[Sequence[int]], queries: Sequence[Sequence[int]]
) -> npt.NDArray[np.float64]:
    """The cosine of each query with each chunk by scikit-learn; n-grams that no chunk has count too."""
    spelled = [[" ".join(map(str, ids)) for ids in many] for many in (chunks, queries)]
    counter = CountVectorizer(ngram_range=(1, 3), binary=True, token_pattern=r"\S+")
    counter.fit(spelled[0] + spelled[1])
    transformer = TfidfTransformer().fit(counter.transform(spelled[0]))
    keys, wanted = (transformer.transform(counter.transform(texts)) for texts in spelled)
    return np.asarray(cosine_similarity(wanted, keys), np.float64)


def choose_neighbours(
    chunks: Sequence[tuple[str, int, list[int]]], cosines: npt.NDArray[Any], count: int
) -> list[int]:
    """The chunks of the largest cosines, of which no two overlap, by looking at all."""
    chosen: list[int] = []
    for index in np.argsort(-cosines, kind="stable").tolist():
        name, start, _ = chunks[index]
        overlaps = [other for other in chosen if chunks[other][0] == name]
        if all(abs(chunks[other][1] - start) >= LENGTH for other in overlaps):
            chosen.append(index)
    return chosen[:count]
