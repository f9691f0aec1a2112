"""How much of a text an index has almost word by word, by 13-grams as RETRO's authors filter test texts.

Not every place of the index is looked at. A stretch that is like a chunk has so many of its n-grams that some
are found where only each `stride`-th place is compared, by three or four of its tokens; what is around
these is then compared exactly. So 100 million tokens take a fraction of a second.

T tokens of the index, n tokens of an n-gram, m tokens of a chunk, N places of n-grams
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

GRAM = 13
LEAST_SIMILARITY = 0.8
BLOCK = 2**16  # places that are looked at together: what is computed of them stays in a processor's cache
SEEDS = 4096  # places around which stretches are compared together
CODE_TOKENS = 4  # of an n-gram, by which most places are passed over
CODE_BITS = 20
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no token is lost in a hash
SHORT_FACTOR = np.uint32(0x9E3779B1)

Places = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Spans = npt.NDArray[np.int64]
Tokens = npt.NDArray[Any]


class OwnChunk(NamedTuple):
    """A chunk of the text: its tokens, and the hashes of its n-grams, each once and ascending."""

    tokens: npt.NDArray[np.int64]
    grams: Hashes


def measure_overlap(text: Sequence[int], tokens: Tokens, spans: Spans, chunk_length: int) -> float:
    """Return the share of a text's chunks that are like a stretch of an index's tokens.

    Args:
        text: its token ids. The last chunk may be short, but not shorter than half of one; a text of fewer
            tokens has no chunks, and its share is 0.
        tokens: the index's, (T,).
        spans: the first token of each document, and the one behind it.
        chunk_length: the tokens of a chunk.
    """
    size = min(GRAM, (chunk_length + 1) // 2)  # the shortest chunk has one
    whole = np.array(text, np.int64)
    parts = [whole[begin : begin + chunk_length] for begin in range(0, len(whole), chunk_length)]
    chunks = [
        OwnChunk(part, np.unique(hash_grams(part, np.arange(len(part) - size + 1), size)))
        for part in parts
        if 2 * len(part) >= chunk_length
    ]
    if not chunks:
        return 0.0
    left = list(chunks)
    for places in find_seeds(chunks, tokens, size):
        hashes = hash_grams(tokens, places, size)
        left = [
            chunk
            for chunk in left
            if not is_copied(chunk, tokens, spans, places[np.isin(hashes, chunk.grams)], size)
        ]
        if not left:
            break
    return (len(chunks) - len(left)) / len(chunks)


def hash_grams(tokens: Tokens, places: Places, size: int) -> Hashes:
    """Return a hash of the n-gram at each place."""
    hashes = np.zeros(len(places), np.uint64)
    for shift in range(size):
        hashes *= FACTOR
        hashes += tokens[places + shift].astype(np.uint64) + np.uint64(1)
        hashes ^= hashes >> np.uint64(32)
    return hashes


def make_codes(columns: Iterable[Tokens]) -> npt.NDArray[np.uint32]:
    """Return numbers of CODE_BITS of rows of tokens, by their columns."""
    codes = np.uint32(0)
    for column in columns:
        codes = (codes + column.astype(np.uint32)) * SHORT_FACTOR
    return np.asarray(codes >> np.uint32(32 - CODE_BITS), np.uint32)


def choose_stride(chunk: OwnChunk, size: int) -> int:
    """Return how far apart places may be, so that a stretch like a chunk has a common n-gram at one of them.

    The chunk has `most` n-grams, each once. A stretch with f >= 1 others has at least 0.8 * (most + f) in
    common, and as many places of them, so of its `count` places at most count - 0.8 * (most + 1) are others.
    """
    most = len(chunk.grams)
    if most < len(chunk.tokens) - size + 1:  # one is there twice: no such sum
        return 1
    strides = []
    for count in range(most, 0, -1):  # fewer at a document's end
        if count < LEAST_SIMILARITY * most:
            break
        others = max(int(count - LEAST_SIMILARITY * (most + 1) + 1e-6), 0)
        strides.append(count // (others + 1))
    return min(strides)


def find_seeds(chunks: Sequence[OwnChunk], tokens: Tokens, size: int) -> Iterator[Places]:
    """Yield the places of n-grams of chunks, of those that are looked at, by blocks."""
    stride = min(choose_stride(chunk, size) for chunk in chunks)
    shifts = range(0, size, stride)[:CODE_TOKENS]
    known = np.zeros(2**CODE_BITS, np.bool_)
    for chunk in chunks:
        count = len(chunk.tokens) - size + 1
        known[make_codes(chunk.tokens[shift : shift + count] for shift in shifts)] = True
    wanted = np.unique(np.concatenate([chunk.grams for chunk in chunks]))
    total = max(len(tokens) - size + 1, 0)
    for begin in range(0, total, BLOCK * stride):
        count = -(-(min(begin + BLOCK * stride, total) - begin) // stride)
        looked = tokens[begin : begin + (count + len(shifts) - 1) * stride : stride].astype(np.uint32)
        codes = make_codes(looked[index : index + count] for index in range(len(shifts)))
        places = begin + stride * np.flatnonzero(known[codes])
        places = places[np.isin(hash_grams(tokens, places, size), wanted)]
        if len(places):
            yield places


def is_copied(chunk: OwnChunk, tokens: Tokens, spans: Spans, seeds: Places, size: int) -> bool:
    """Tell whether a stretch of a document, as long as the chunk, has nearly the same n-grams.

    Args:
        chunk: that is looked for.
        tokens: see `measure_overlap`, as for the spans.
        spans: of the documents.
        seeds: ascending places of its n-grams, one of which such a stretch has.
        size: the tokens of an n-gram.
    """
    return any(
        has_copy(chunk, tokens, spans, seeds[begin : begin + SEEDS], size)
        for begin in range(0, len(seeds), SEEDS)
    )


def has_copy(chunk: OwnChunk, tokens: Tokens, spans: Spans, seeds: Places, size: int) -> bool:
    """Tell whether one of the stretches that have an n-gram at one of the seeds is like a chunk.

    A stretch belongs to the document that has its middle, and ends where that does.
    """
    length = len(chunk.tokens)
    count = length - size + 1
    places = spread(seeds, count - 1)
    inside = np.clip(places, 0, len(tokens) - size)
    owners = np.maximum(np.searchsorted(spans[:, 0], inside, side="right") - 1, 0)
    firsts, ends = spans[owners].T
    real = (places >= firsts) & (places + size <= ends)
    hashes = hash_grams(tokens, inside, size)
    before = find_previous(hashes, np.where(real, places, -1), firsts)
    # The stretches that count the n-gram at a place begin behind the one that has it twice.
    begins = np.maximum(np.maximum(before + 1, places - count + 1), firsts - length // 2)
    behind = np.minimum(places + 1, ends - length // 2)
    valid = real & (begins < behind)
    common = valid & np.isin(hashes, chunk.grams)
    found = count_ranges(places, begins[common], behind[common])
    every = count_ranges(places, begins[valid], behind[valid])
    alike = found >= LEAST_SIMILARITY * (len(chunk.grams) + every - found)
    reached = np.searchsorted(seeds, places) < np.searchsorted(seeds, places + count)
    return bool(np.any(alike & reached))


def spread(seeds: Places, reach: int) -> Places:
    """Return the places that are no farther than `reach` from an ascending one, each once, ascending."""
    begins = seeds - reach
    begins[1:] = np.maximum(begins[1:], seeds[:-1] + reach + 1)
    counts = seeds + reach + 1 - begins
    offsets = np.cumsum(counts) - counts
    places: Places = np.arange(counts.sum()) + np.repeat(begins - offsets, counts)
    return places


def find_previous(hashes: Hashes, places: Places, firsts: Places) -> Places:
    """Return for each place the last one before it with its n-gram in its document, else less than all."""
    order = np.argsort(hashes, kind="stable")
    order = order[places[order] >= 0]
    same = hashes[order[1:]] == hashes[order[:-1]]
    before = np.full(len(places), np.iinfo(np.int64).min // 2)
    before[order[1:][same]] = places[order[:-1][same]]
    before[before < firsts] = np.iinfo(np.int64).min // 2
    return before


def count_ranges(places: Places, begins: Places, ends: Places) -> Places:
    """Return in how many ranges each of the ascending places lies."""
    length = len(places) + 1
    changes = np.bincount(np.searchsorted(places, begins), minlength=length)
    changes -= np.bincount(np.searchsorted(places, ends), minlength=length)
    counted: Places = np.cumsum(changes)[:-1]
    return counted
