"""How much of a text an index has, against a comparison with every stretch of its documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from planforge.runtime.search import overlap
from planforge.runtime.search.overlap import measure_overlap

Spans = list[tuple[int, int]]


def list_grams(ids: Sequence[int], size: int) -> set[tuple[int, ...]]:
    return {tuple(ids[begin : begin + size]) for begin in range(len(ids) - size + 1)}


def compare_all(text: Sequence[int], tokens: Sequence[int], spans: Spans, length: int) -> float:
    """Compare each chunk with each stretch whose middle is in a document, and which ends where that does."""
    size = min(13, (length + 1) // 2)
    chunks = [text[begin : begin + length] for begin in range(0, len(text), length)]
    chunks = [chunk for chunk in chunks if 2 * len(chunk) >= length]
    found = 0
    for chunk in chunks:
        own = list_grams(chunk, size)
        stretches = [
            tokens[max(begin, first) : min(begin + len(chunk), end)]
            for first, end in spans
            for begin in range(first - len(chunk) // 2, end - len(chunk) // 2)
        ]
        others = [list_grams(stretch, size) for stretch in stretches]
        found += any(len(own & other) >= 0.8 * len(own | other) for other in others)
    return found / len(chunks) if chunks else 0.0


def draw_documents(draws: np.random.Generator, length: int, words: int) -> tuple[list[int], Spans]:
    """Return some documents in padded rows, some of which repeat themselves, and where they are."""
    tokens: list[int] = []
    spans = []
    for _ in range(draws.integers(1, 6)):
        ids = draws.integers(0, words, draws.integers(1, 90))
        if draws.random() < 0.3:
            ids = np.resize(ids[: draws.integers(1, 8)], len(ids))
        spans.append((len(tokens), len(tokens) + len(ids)))
        tokens += [*ids.tolist(), *[words] * (-len(ids) % length)]
    return tokens, spans


def draw_copy(draws: np.random.Generator, tokens: Sequence[int], words: int) -> list[int]:
    """Return a part of the tokens with up to two other ones, in their place or between them, or without."""
    begin = int(draws.integers(0, len(tokens)))
    ids = list(tokens[begin : begin + int(draws.integers(1, 60))])
    for place in draws.integers(0, len(ids), draws.integers(0, 3)).tolist():
        kept = int(draws.integers(0, 3))
        ids[place : place + min(kept, 1)] = [int(draws.integers(0, words + 1))] if kept < 2 else []
    return ids


@pytest.mark.parametrize("words", [1, 2, 50])
@pytest.mark.parametrize("length", [2, 3, 8, 16, 32])
def test_every_stretch_is_as_good_as_looked_at(
    length: int, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks and parts of few places too: what is alike lies across them."""
    draws = np.random.default_rng(100 * length + words)
    shares = set()
    for number in range(24):
        monkeypatch.setattr(overlap, "BLOCK", 2**16 if number % 2 else 5)
        monkeypatch.setattr(overlap, "SEEDS", 4096 if number % 2 else 3)
        tokens, spans = draw_documents(draws, length, words)
        text = [token for _ in range(2) for token in draw_copy(draws, tokens, words)]
        share = measure_overlap(text, np.array(tokens, np.uint8), np.array(spans), length)
        assert share == compare_all(text, tokens, spans, length)
        shares.add(share)
    assert len(shares) > 1


def test_few_places_of_an_index_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of 50 chunks, half of which an index of 200,000 tokens has."""
    draws = np.random.default_rng(0)
    tokens = (draws.zipf(1.2, 200_000) % 30_000).astype(np.uint16)
    text = np.concatenate([tokens[50_005 : 50_005 + 800], draws.zipf(1.2, 800) % 30_000]).tolist()
    hashed = []
    hash_grams = overlap.hash_grams

    def count(*arguments: Any) -> Any:
        found = hash_grams(*arguments)
        hashed.append(len(found))
        return found

    monkeypatch.setattr(overlap, "hash_grams", count)
    assert measure_overlap(text, tokens, np.array([[0, 200_000]]), 32) == 0.5
    assert sum(hashed) < 10_000


def test_stretches_of_many_places_are_compared_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of one token alone, which has a text's n-grams everywhere, but never enough of them."""
    calls = []
    has_copy = overlap.has_copy

    def count(*arguments: Any) -> bool:
        calls.append(arguments)
        return has_copy(*arguments)

    monkeypatch.setattr(overlap, "has_copy", count)
    tokens = np.zeros(100_000, np.uint16)
    assert measure_overlap([0] * 31 + [1], tokens, np.array([[0, 100_000]]), 32) == 0
    assert 0 < len(calls) < 50
