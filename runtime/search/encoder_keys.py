"""Keys that an encoder's bundle computes: vectors of length 1, compared by their product.

Chunks are decoded, and the encoder reads their text. Up to a million rows are searched exactly, by blocks;
more with faiss, by the lists of rows that are nearest to the key.

R rows of an index, D dimensions of a key, Q keys that are looked for
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import BackendUnavailableError, InputError, IntegrityError, suggest_install
from ..text.tokenizer import Tokenizer
from .files import IndexFiles
from .keys import Chunk, EngineOptions, Nearest, choose_nearest
from .layout import WAY_OUT, KeysRecord, Layout

if TYPE_CHECKING:
    from ..encode.text_encoder import TextEncoder

Float32: TypeAlias = npt.NDArray[np.float32]

MOST_EXACT_ROWS = 1_000_000
PIECE_ROWS = 16_384  # that a thread takes at a time
BLOCK_ROWS = 512  # of these, that are compared with every key while a processor's cache has them
MOST_THREADS = 4  # more wait for memory
QUERIES = 32  # that are searched at a time: their cosines with all rows are in memory
TEXTS = 256  # that are encoded at a time
PROBED_LISTS = 64  # of faiss, for each key
LISTED_ROWS = 256  # of each list of faiss, about


class EncoderKeys:
    """The vectors of an encoder; see `Keys`. Safe to use from several threads."""

    def __init__(
        self,
        files: IndexFiles,
        layout: Layout,
        tokenizer: Tokenizer,
        folder: str | Path | None,
        engine: EngineOptions,
    ) -> None:
        self._tokenizer = tokenizer
        self._size = layout.keys.size
        self._faiss: Any = None
        if layout.rows > MOST_EXACT_ROWS:
            self._faiss = open_faiss(files, layout)
        else:
            self._vectors: Float32 = files.open("keys.npy", np.float32, (layout.rows, self._size))
        self._threads = start_threads(engine.threads)
        self._encoder = open_encoder(layout.keys, folder, files.folder, engine)

    def compute(self, chunks: Sequence[Chunk]) -> Float32:
        """Return the vectors (Q, D) of chunks."""
        texts = [self._tokenizer.decode_known(chunk) for chunk in chunks]
        vectors = embed(self._encoder, texts)
        if vectors.shape[1] != self._size:
            raise IntegrityError(
                f"the encoder's vectors have {vectors.shape[1]} numbers, and the index's keys {self._size};"
                f" {WAY_OUT}"
            )
        return vectors

    def search(self, queries: Float32, number: int, skipped: npt.NDArray[np.bool_]) -> list[Nearest]:
        """Return the nearest rows of each key; see `Keys.search`."""
        if self._faiss is not None:
            return search_faiss(self._faiss, queries, number, skipped)
        found: list[Nearest] = []
        for begin in range(0, len(queries), QUERIES):
            cosines = multiply(queries[begin : begin + QUERIES], self._vectors, self._threads)
            found += [choose_nearest(row, number, skipped) for row in cosines]
        return found

    def close(self) -> None:
        """Close the encoder; the threads end with the last search."""
        self._encoder.close()


def start_threads(threads: int | None = None) -> ThreadPoolExecutor:
    """Return threads that multiply: as many as were asked for, if they are not too many."""
    return ThreadPoolExecutor(min(MOST_THREADS, threads or os.cpu_count() or 1), "planforge-search")


def multiply(queries: Float32, vectors: Float32, threads: ThreadPoolExecutor) -> Float32:
    """Return the products (Q, R) of keys with all rows.

    Each is a dot product of its own, so that it does not depend on how many keys are searched at once. A
    product of matrices rounds otherwise for another number of them, and its threads spin while others work.
    """
    products = np.empty((len(queries), len(vectors)), np.float32)

    def fill(begin: int) -> None:
        end = min(begin + PIECE_ROWS, len(vectors))
        for first in range(begin, end, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, end)
            for query, row in zip(queries, products, strict=True):
                np.vecdot(vectors[first:last], query, out=row[first:last])

    list(threads.map(fill, range(0, len(vectors), PIECE_ROWS)))
    return products


def embed(encoder: TextEncoder, texts: Sequence[str]) -> Float32:
    """Return the texts' vectors of length 1; what is too long for the encoder loses its end."""
    vectors = encoder.embed(texts, normalize=True, truncation="head")
    return np.ascontiguousarray(vectors, np.float32)


def open_encoder(
    record: KeysRecord, folder: str | Path | None, index: Path, engine: EngineOptions
) -> TextEncoder:
    """Open the bundle whose encoder made an index's keys; refuse another.

    Raises:
        InputError: there is no such bundle, or it is not that one.
    """
    from ..bundle.bundle import Bundle
    from ..encode.text_encoder import TextEncoder

    place = Path(record.folder if folder is None else folder)
    way_out = "say where it is by index_keys, or make the index again with `planforge index --keys BUNDLE`"
    if not place.is_dir():
        raise InputError(
            f"{index}: the bundle {place}, whose encoder made the keys, is not there; {way_out}",
            option="index_keys",
        )
    found = Bundle.open(place).manifest.export_id
    if found != record.export_id:
        raise InputError(
            f"{index} has keys of another encoder than {place}: of the export {record.export_id[:8]}, and"
            f" this one is {found[:8]}; {way_out}",
            option="index_keys",
        )
    return TextEncoder.load(place, precision=record.precision, **engine._asdict())


def describe_encoder(encoder: TextEncoder, size: int) -> KeysRecord:
    """Return what index.json says of the keys of an encoder that was loaded from a bundle."""
    folder = encoder.bundle.folder.resolve()
    return KeysRecord(
        "encoder", str(folder), encoder.bundle.manifest.export_id, encoder.artifact.precision, size
    )


def write_vectors(
    folder: Path,
    layout: Layout,
    texts: Callable[[int, int], list[str]],
    encoder: TextEncoder,
    tell: Callable[[int, int], None],
) -> int:
    """Write the keys of an index's rows, whose texts `texts` returns from one row to another; return D."""
    if layout.rows > MOST_EXACT_ROWS:
        import_faiss()  # what is missing is said before the work
    first = embed(encoder, texts(0, 1))
    size = int(first.shape[1])
    path = folder / "keys.npy"
    keys = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(layout.rows, size))
    for begin in range(0, layout.rows, TEXTS):
        tell(begin, layout.rows)
        end = min(begin + TEXTS, layout.rows)
        keys[begin:end] = embed(encoder, texts(begin, end))
    tell(layout.rows, layout.rows)
    keys.flush()
    if layout.rows > MOST_EXACT_ROWS:
        write_faiss(folder / "keys.faiss", keys)
        del keys
        path.unlink()
    return size


def import_faiss() -> Any:
    """Return the module faiss, which searches more than a million rows."""
    try:
        import faiss
    except ImportError as error:
        raise BackendUnavailableError(
            f"an index of more than {MOST_EXACT_ROWS:,} chunks with an encoder's keys needs faiss:"
            f" {suggest_install('faiss')}"
        ) from error
    return faiss


def write_faiss(path: Path, vectors: Float32) -> None:
    """Write faiss's file of vectors, in lists of those that are near to each other."""
    faiss = import_faiss()
    count = max(1, len(vectors) // LISTED_ROWS)
    made = faiss.index_factory(vectors.shape[1], f"IVF{count},Flat", faiss.METRIC_INNER_PRODUCT)
    some = np.random.default_rng(0).permutation(len(vectors))[: 40 * count]
    made.train(np.ascontiguousarray(vectors[np.sort(some)]))
    for begin in range(0, len(vectors), PIECE_ROWS):
        made.add(np.ascontiguousarray(vectors[begin : begin + PIECE_ROWS]))
    faiss.write_index(made, str(path))


def open_faiss(files: IndexFiles, layout: Layout) -> Any:
    """Return faiss's index of an index's keys. Its hash is compared first: faiss trusts what it reads."""
    faiss = import_faiss()
    files.check()
    opened = faiss.read_index(str(files.locate("keys.faiss")))
    if opened.ntotal != layout.rows or opened.d != layout.keys.size:
        raise IntegrityError(f"{files.folder}: keys.faiss has other keys than index.json says; {WAY_OUT}")
    opened.nprobe = PROBED_LISTS
    return opened


def search_faiss(opened: Any, queries: Float32, number: int, skipped: npt.NDArray[np.bool_]) -> list[Nearest]:
    """Return the nearest rows of each key of those in the lists that faiss probes."""
    faiss = import_faiss()
    selector = faiss.IDSelectorBatch(np.flatnonzero(~skipped))
    options = faiss.SearchParametersIVF(sel=selector, nprobe=PROBED_LISTS)
    cosines, rows = opened.search(queries, min(number, opened.ntotal), params=options)
    return [
        Nearest(ids[ids >= 0], values[ids >= 0].astype(np.float64))
        for ids, values in zip(rows, cosines, strict=True)
    ]
