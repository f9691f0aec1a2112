"""Keys without a model: TF-IDF of a chunk's n-grams of 1 to 3 tokens, compared by their cosine.

An n-gram counts once in a chunk, with scikit-learn's smooth weight log((1 + N) / (1 + df)) + 1, where df of
N chunks have it. The index lists where in its rows each token is. So the places of an n-gram are those of its
rarest token where the others stand beside it: nothing is stored for pairs and triples, nothing is hashed.

Places count through all rows, R x m. Each takes as many bytes as the highest needs, W: 3 for up to half a
million chunks of 32. Those of a frequent token take one byte each, and one for every block of 255 places.

R rows of an index, m tokens of a row, V ids, W bytes of a place, F frequent tokens, B blocks
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import IntegrityError
from .files import IndexFiles, refuse_misfits
from .keys import Chunk, Nearest, choose_nearest
from .layout import WAY_OUT, Layout

LONGEST = 3  # tokens of an n-gram
BLOCK = 255  # places whose number of one token, and each of which, is a byte
FEW_ROWS = 16  # a token has a mask where more than one of so many rows have it
KEPT_BYTES = 96 * 2**20  # of places that stay in memory

Places = npt.NDArray[np.int64]
Gram = tuple[int, ...]
Rows = npt.NDArray[Any]


class PlaceLists(NamedTuple):
    """Where each token stands.

    Attributes:
        starts: of each token's places in `places`, (V + 1,); uint32, or uint64 where there are more.
        places: of tokens that are not frequent, (N, W) uint8; see `pack`.
        frequent: the frequent tokens, (F,) int64, ascending.
        counts: how often each of them is in each block, (F, B) uint8.
        offsets: of each of its places in their block, uint8.
    """

    starts: npt.NDArray[Any]
    places: npt.NDArray[np.uint8]
    frequent: npt.NDArray[np.int64]
    counts: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.uint8]


def list_grams(chunk: Chunk) -> list[Gram]:
    """Return the n-grams of a chunk, each once; shorter ones first."""
    ids = [int(token) for token in chunk]
    grams = [
        tuple(ids[begin : begin + size])
        for size in range(1, LONGEST + 1)
        for begin in range(len(ids) - size + 1)
    ]
    return list(dict.fromkeys(grams))


def weigh(df: Any, chunks: int) -> Any:
    """Return the weight of an n-gram, or of several, that `df` of so many chunks have."""
    return np.log((1 + chunks) / (1 + df)) + 1


class TokenPlaces(NamedTuple):
    """Where one token stands, and what stands beside it in its rows.

    Attributes:
        places: ascending, int64.
        following: the token behind each place, of the tokens' type; the padding at a row's end.
        previous: the token before each place; the padding at a row's begin.
        df: how many rows have the token.
        rows: these, each once; none where there is a mask.
        mask: 1 for these rows and 0 for others, float32; None of a token of few rows.
    """

    places: Places
    following: Rows
    previous: Rows
    df: int
    rows: Places
    mask: npt.NDArray[np.float32] | None

    def count_bytes(self) -> int:
        """Return the memory that it takes."""
        return sum(part.nbytes for part in self if isinstance(part, np.ndarray))


class KeptPlaces:
    """The places of tokens that were looked up last: most chunks have the same frequent ones."""

    def __init__(self, read: Callable[[int], TokenPlaces]) -> None:
        self._read = read
        self._kept: OrderedDict[int, TokenPlaces] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def find(self, token: int) -> TokenPlaces:
        """Return where a token stands."""
        with self._lock:
            found = self._kept.get(token)
            if found is not None:
                self._kept.move_to_end(token)
                return found
        found = self._read(token)
        with self._lock:
            if token not in self._kept:
                self._kept[token] = found
                self._bytes += found.count_bytes()
            while self._bytes > KEPT_BYTES:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.count_bytes()
        return found


class TfidfKeys:
    """The TF-IDF of n-grams; see `Keys`. Safe to use from several threads."""

    def __init__(self, files: IndexFiles, layout: Layout, tokens: Rows) -> None:
        self._folder = files.folder
        self._tokens = tokens.reshape(-1)
        self._padding = layout.vocab_size
        self._length = layout.chunk_length
        self._chunks = int(layout.chunk_mask.sum())
        self._lists = open_lists(files, layout)
        norms = files.open("norms.npy", np.float32, (layout.rows,))
        self._norms = np.where(norms > 0, norms, np.float32(1))
        ends = np.concatenate([[0], np.cumsum(self._lists.counts.sum(axis=1, dtype=np.int64))])
        if ends[-1] != len(self._lists.offsets):
            raise IntegrityError(f"{files.folder}: its lists of places do not fit each other; {WAY_OUT}")
        self._ends = ends
        self._kept = KeptPlaces(self._read_token)

    def compute(self, chunks: Sequence[Chunk]) -> list[list[Gram]]:
        """Return the n-grams of each chunk."""
        return [list_grams(chunk) for chunk in chunks]

    def search(
        self, queries: Sequence[Sequence[Gram]], number: int, skipped: npt.NDArray[np.bool_]
    ) -> list[Nearest]:
        """Return the nearest rows of each query; see `Keys.search`."""
        with refuse_misfits(self._folder):
            return [choose_nearest(self._measure_cosines(grams), number, skipped) for grams in queries]

    def close(self) -> None:
        """Let go of the places that are kept."""
        self._kept = KeptPlaces(self._read_token)

    def _measure_cosines(self, grams: Sequence[Gram]) -> npt.NDArray[np.float32]:
        """Return the cosine of each row with a query."""
        scores: npt.NDArray[np.float32] = np.zeros(len(self._norms), np.float32)
        square = 0.0
        found: dict[Gram, Places] = {}
        tokens: dict[Gram, TokenPlaces] = {gram: self._kept.find(gram[0]) for gram in grams if len(gram) == 1}
        for gram in grams:
            mask = None
            if len(gram) == 1:
                _, _, _, df, rows, mask = tokens[gram]
            else:
                found[gram] = self._find_gram(gram, tokens, found)
                rows = drop_repeats(found[gram] // self._length)
                df = len(rows)
            weight = weigh(df, self._chunks) ** 2
            square += weight
            if mask is None:
                scores[rows] += np.float32(weight)
            else:
                scores += mask * np.float32(weight)
        scores /= self._norms * np.float32(max(square, 1e-12) ** 0.5)
        return scores

    def _find_gram(
        self, gram: Gram, tokens: Mapping[Gram, TokenPlaces], found: Mapping[Gram, Places]
    ) -> Places:
        """Return the places of a pair from those of its tokens, and of a longer one from its two parts."""
        places: Places
        if len(gram) == 2:
            first = tokens[gram[:1]]
            second = tokens[gram[1:]]
            if len(first.places) <= len(second.places):
                places = first.places[first.following == gram[1]]
            else:
                places = second.places[second.previous == gram[0]] - 1
            return places
        reach = len(gram) - 1
        begins = found[gram[:-1]]
        ends = found[gram[1:]]
        if len(begins) <= len(ends):
            places = begins[self._tokens.take(begins + reach, mode="clip") == gram[-1]]
        else:
            places = ends[self._tokens.take(ends - 1, mode="clip") == gram[0]] - 1
        whole: Places = places[(places >= 0) & (places % self._length < self._length - reach)]
        return whole

    def _read_token(self, token: int) -> TokenPlaces:
        """Return where a token stands, and what stands beside it."""
        places = self._read_places(token)
        column = places % self._length
        following = self._tokens.take(places + 1, mode="clip")
        following[column == self._length - 1] = self._padding
        previous = self._tokens.take(places - 1, mode="clip")
        previous[column == 0] = self._padding
        rows = drop_repeats(places // self._length)
        if len(rows) * FEW_ROWS <= len(self._norms):
            return TokenPlaces(places, following, previous, len(rows), rows, None)
        mask = np.zeros(len(self._norms), np.float32)
        mask[rows] = 1
        return TokenPlaces(places, following, previous, len(rows), rows[:0].copy(), mask)

    def _read_places(self, token: int) -> Places:
        """Return where a token stands, ascending; nowhere, if it is no token of the vocabulary."""
        lists = self._lists
        if not 0 <= token < len(lists.starts) - 1:
            return np.empty(0, np.int64)
        index = int(np.searchsorted(lists.frequent, token))
        if index < len(lists.frequent) and lists.frequent[index] == token:
            blocks = np.arange(lists.counts.shape[1]) * BLOCK
            offsets = lists.offsets[self._ends[index] : self._ends[index + 1]]
            return np.repeat(blocks, lists.counts[index]) + offsets
        return unpack(lists.places[int(lists.starts[token]) : int(lists.starts[token + 1])])


def pack(places: Places, width: int) -> npt.NDArray[np.uint8]:
    """Return places as bytes (N, width), the lowest first."""
    wide = places.astype("<u8").view(np.uint8).reshape(-1, 8)
    return np.ascontiguousarray(wide[:, :width])


def unpack(packed: npt.NDArray[np.uint8]) -> Places:
    """Return the places of bytes; see `pack`."""
    wide = np.zeros((len(packed), 8), np.uint8)
    wide[:, : packed.shape[1]] = packed
    return wide.view("<i8").reshape(-1)


def measure_width(places: int) -> int:
    """Return the bytes of the highest of so many places."""
    return -(-(places - 1).bit_length() // 8)


def drop_repeats(rows: Places) -> Places:
    """Return ascending numbers, each once."""
    if len(rows) < 2:
        return rows
    first = np.ones(len(rows), np.bool_)
    np.not_equal(rows[1:], rows[:-1], out=first[1:])
    return rows[first]


def open_lists(files: IndexFiles, layout: Layout) -> PlaceLists:
    """Return the lists of an index's folder."""
    places = layout.rows * layout.chunk_length
    blocks = -(-places // BLOCK)
    starts = files.open("starts.npy", choose_type(places), (layout.vocab_size + 1,))
    rare = files.open("places.npy", np.uint8, (None, measure_width(places)))
    frequent = files.open("frequent.npy", np.int64, (None,))
    counts = files.open("counts.npy", np.uint8, (len(frequent), blocks))
    offsets = files.open("offsets.npy", np.uint8, (None,))
    if starts[0] != 0 or starts[-1] != len(rare) or np.any(starts[1:] < starts[:-1]):
        raise IntegrityError(f"{files.folder}: its lists of places do not fit each other; {WAY_OUT}")
    return PlaceLists(starts, rare, frequent, counts, offsets)


def choose_type(places: int) -> type[np.uint32] | type[np.uint64]:
    """Return the type of a number of places."""
    return np.uint32 if places <= 2**32 else np.uint64


def make_lists(tokens: Rows, chunks: npt.NDArray[np.bool_], vocab_size: int) -> PlaceLists:
    """Return where each token stands in the rows (R, m) that are chunks."""
    flat = tokens.reshape(-1)
    valid = np.repeat(chunks, tokens.shape[1]) & (flat != vocab_size)
    order = np.argsort(flat, kind="stable")
    order = order[valid[order]]
    counts = np.bincount(flat[order], minlength=vocab_size)
    ends = np.concatenate([[0], np.cumsum(counts)])
    blocks = -(-flat.size // BLOCK)
    width = measure_width(flat.size)
    is_frequent = (width - 1) * counts > blocks
    frequent = np.flatnonzero(is_frequent)
    number = np.zeros((len(frequent), blocks), np.uint8)
    offsets = []
    for index, token in enumerate(frequent):
        places = order[ends[token] : ends[token + 1]]
        number[index] = np.bincount(places // BLOCK, minlength=blocks)
        offsets.append((places % BLOCK).astype(np.uint8))
    rare = pack(order[~np.repeat(is_frequent, counts)], width)
    starts = np.concatenate([[0], np.cumsum(np.where(is_frequent, 0, counts))])
    starts = starts.astype(choose_type(flat.size))
    joined = np.concatenate(offsets) if offsets else np.empty(0, np.uint8)
    return PlaceLists(starts, rare, frequent, number, joined)


def measure_norms(
    tokens: Rows, chunks: npt.NDArray[np.bool_], vocab_size: int, tell: Callable[[int, int], None]
) -> npt.NDArray[np.float32]:
    """Return the length of each row's key; 0 of rows that are no chunks."""
    rows, m = tokens.shape
    wide = tokens.astype(np.uint64)
    real = (tokens != vocab_size) & chunks[:, None]
    squares = np.zeros(rows)
    codes = wide
    for size in range(1, min(LONGEST, m) + 1):
        tell(size - 1, LONGEST)
        if size > 1:
            _, ranks = np.unique(codes, return_inverse=True)
            ranks = ranks.reshape(codes.shape)[:, :-1].astype(np.uint64)
            codes = ranks * np.uint64(vocab_size + 1) + wide[:, size - 1 :]
        squares += sum_squares(codes, real[:, size - 1 :], int(chunks.sum()))
    tell(LONGEST, LONGEST)
    return np.sqrt(squares).astype(np.float32)


def sum_squares(
    codes: npt.NDArray[np.uint64], real: npt.NDArray[np.bool_], chunks: int
) -> npt.NDArray[np.float64]:
    """Return the sum of the squared weights of each row's n-grams of one size, which have these codes."""
    order = np.argsort(codes, axis=1, kind="stable")
    codes = np.take_along_axis(codes, order, axis=1)
    first = np.take_along_axis(real, order, axis=1)
    first[:, 1:] &= codes[:, 1:] != codes[:, :-1]
    owner = np.nonzero(first)[0]
    _, inverse, df = np.unique(codes[first], return_inverse=True, return_counts=True)
    weights: npt.NDArray[np.float64] = weigh(df, chunks)[inverse]
    return np.asarray(np.bincount(owner, weights=weights**2, minlength=len(codes)), np.float64)


def write_tfidf(folder: Path, layout: Layout, tokens: Rows, tell: Callable[[int, int], None]) -> None:
    """Write the files of an index's TF-IDF keys."""
    lists = make_lists(tokens, layout.chunk_mask, layout.vocab_size)
    for name, array in lists._asdict().items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    norms = measure_norms(tokens, layout.chunk_mask, layout.vocab_size, tell)
    np.save(folder / "norms.npy", norms, allow_pickle=False)
