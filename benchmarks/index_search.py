"""How long an exact search over 100,000 chunks takes, by both kinds of keys, and what longer n-grams change.

python -m benchmarks.index_search VERSES TOKENIZER WORK [--chunks 100000]

VERSES is what the program `bible` prints, a verse a line behind its reference. Texts of 100,000 chunks are
verses that are drawn at random, so each of their chunks has much that is alike; so are the queries, by other
draws. Keys of an encoder are random vectors: an exact search takes the same time whatever they say, and
without the time that the encoder takes. Writes results/index_search.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from planforge.runtime.bundle.bundle import compute_sha256
from planforge.runtime.search import tfidf
from planforge.runtime.search.build import build_index
from planforge.runtime.search.encoder_keys import multiply, start_threads
from planforge.runtime.search.keys import choose_nearest
from planforge.runtime.search.neighbour_index import NeighbourIndex
from planforge.runtime.text.tokenizer import Tokenizer

from .common import write_result
from .machine import busy_share

CHUNK = 32
NEIGHBOUR = 64
COUNT = 2  # neighbours of each query
QUERIES = 200
SIZE = 384  # of an encoder's vectors, as of all-MiniLM-L6-v2
VERSES = 5_000  # of one document
LONGEST = (1, 2, 3, 4)  # tokens of n-grams


class Corpus:
    """A tokenizer, and verses that it reads."""

    def __init__(self, verses: Path, tokenizer: Path) -> None:
        lines = verses.read_text(encoding="utf-8").splitlines()
        self.books: dict[str, list[str]] = {}
        for line in lines:
            reference, _, text = line.partition(" ")
            self.books.setdefault(reference.partition(":")[0].rstrip("0123456789"), []).append(text.strip())
        self.verses = [verse for book in self.books.values() for verse in book]
        self.tokenizer = Tokenizer.from_file(tokenizer)
        self.hash = compute_sha256(tokenizer)

    def draw(self, tokens: int) -> Iterator[tuple[str, str]]:
        """Yield documents of random verses that have together at least so many tokens."""
        draws = np.random.default_rng(0)
        total = 0
        for number in range(tokens):
            text = " ".join(self.verses[verse] for verse in draws.integers(len(self.verses), size=VERSES))
            yield f"{number}.txt", text
            total += len(self.tokenizer.encode(text))
            if total >= tokens:
                return

    def make_queries(self) -> list[list[int]]:
        """Return chunks of random verses."""
        draws = np.random.default_rng(1).integers(len(self.verses), size=VERSES)
        ids = self.tokenizer.encode(" ".join(self.verses[verse] for verse in draws))
        return [ids[begin : begin + CHUNK] for begin in range(0, QUERIES * CHUNK, CHUNK)]

    def build(self, texts: Any, folder: Path) -> dict[str, Any]:
        """Write an index of n-grams; return what it has and took."""
        began = time.perf_counter()
        counts = build_index(
            texts,
            folder,
            tokenizer=self.tokenizer,
            tokenizer_hash=self.hash,
            chunk_length=CHUNK,
            neighbour_length=NEIGHBOUR,
            force=True,
        )
        seconds = round(time.perf_counter() - began, 1)
        return {
            **counts._asdict(),
            "bytes_per_token": round(counts.bytes / counts.tokens, 2),
            "seconds": seconds,
        }

    def open(self, folder: Path) -> NeighbourIndex:
        """Open an index."""
        return NeighbourIndex.open(folder, self.tokenizer, self.hash, CHUNK, NEIGHBOUR)


def measure(search: Callable[[int], object]) -> dict[str, float]:
    """Return the milliseconds of each of QUERIES searches, one after another."""
    seconds = []
    used = time.process_time()
    for number in range(QUERIES):
        began = time.perf_counter()
        search(number)
        seconds.append(time.perf_counter() - began)
    used = time.process_time() - used
    found = {"first": seconds[0], "p50": float(np.median(seconds)), "p99": float(np.quantile(seconds, 0.99))}
    found["processor_mean"] = used / QUERIES
    return {name: round(1000 * value, 2) for name, value in found.items()}


def measure_grams(corpus: Corpus, work: Path) -> dict[str, Any]:
    """Return what n-grams of each length take in an index of all books, and what they find.

    The queries are a book's chunks, whose neighbours are of other books, and compared with those by n-grams
    of 1 to 3 tokens.
    """
    texts = {name: " ".join(verses) for name, verses in corpus.books.items()}
    name = list(texts)[-20]
    ids = corpus.tokenizer.encode(texts[name])
    queries = [
        ids[begin : begin + CHUNK] for begin in range(0, min(len(ids), QUERIES * CHUNK) - CHUNK, CHUNK)
    ]
    found: dict[int, Any] = {}
    result: dict[str, Any] = {}
    shipped = tfidf.LONGEST
    try:
        for longest in LONGEST:
            tfidf.LONGEST = longest
            built = corpus.build(texts, work / "books")
            with corpus.open(work / "books") as index:
                index.find(queries, COUNT, [name])
                began = time.process_time()
                nearest = index.find(queries, COUNT, [name])
                used = (time.process_time() - began) / len(queries)
            found[longest] = [[(near.document, near.start) for near in near_one] for near_one in nearest]
            result[f"1 to {longest}"] = {**built, "processor_ms": round(1000 * used, 2)}
    finally:
        tfidf.LONGEST = shipped
    for longest, own in found.items():
        pairs = list(zip(own, found[shipped], strict=True))
        same = np.mean([mine[0] == wanted[0] for mine, wanted in pairs])
        result[f"1 to {longest}"]["same_nearest"] = round(float(same), 3)
    return result


def measure_tfidf(corpus: Corpus, work: Path, chunks: int) -> dict[str, Any]:
    """Return what an index of so many chunks has, and how long a search takes."""
    built = corpus.build(corpus.draw(chunks * CHUNK), work / "verses")
    queries = corpus.make_queries()
    with corpus.open(work / "verses") as index:
        return {**built, "milliseconds": measure(lambda number: index.find([queries[number]], COUNT))}


def measure_vectors(work: Path, chunks: int) -> dict[str, Any]:
    """Return how long a search among so many vectors takes."""
    draws = np.random.default_rng(2)
    keys: npt.NDArray[np.float32] = draws.standard_normal((chunks, SIZE), np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    queries = draws.standard_normal((QUERIES, SIZE), np.float32)
    np.save(work / "keys.npy", keys)
    mapped = np.asarray(np.load(work / "keys.npy", mmap_mode="r"))
    skipped = np.zeros(chunks, np.bool_)
    threads = start_threads()

    def search(begin: int, end: int) -> None:
        for row in multiply(queries[begin:end], mapped, threads):
            choose_nearest(row, COUNT, skipped)

    return {
        "size": SIZE,
        "bytes": keys.nbytes,
        "milliseconds": measure(lambda number: search(number, number + 1)),
        "milliseconds_of_8_at_once": measure(lambda number: search(number % 8, number % 8 + 8)),
    }


def main() -> None:
    """Measure, and keep the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verses", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("work", type=Path, help="a folder for indexes")
    parser.add_argument("--chunks", type=int, default=100_000)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(options.verses, options.tokenizer)
    result = {
        "chunk": CHUNK,
        "neighbours": COUNT,
        "busy_before": round(busy_share(2.0), 2),
        "grams": measure_grams(corpus, options.work),
        "tfidf": measure_tfidf(corpus, options.work, options.chunks),
        "encoder": measure_vectors(options.work, options.chunks),
    }
    write_result("index_search", result)


if __name__ == "__main__":
    main()
