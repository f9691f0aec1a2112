"""A database of texts: of chunks of tokens, the nearest chunks and what follows them.

R rows of an index, m tokens of a row, N chunks that are looked for
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import ClosedError, InputError, IntegrityError
from ..option_checks import check_whole
from ..text.tokenizer import Tokenizer
from .files import IndexFiles
from .keys import EngineOptions, Keys, Nearest
from .layout import WAY_OUT, Layout, read_layout
from .overlap import measure_overlap

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Neighbour:
    """A chunk of an index's text, with what follows it.

    Attributes:
        document: the name of its text.
        start: its first token in that text.
        distance: 1 less the cosine of its key and that of the chunk that was looked for.
        token_ids: of the chunk and its continuation: fewer than the index's `neighbour_length` at the end of
            a text.
        text: what they say.
    """

    document: str
    start: int
    distance: float
    token_ids: tuple[int, ...]
    text: str


class NeighbourIndex:
    """An index of texts, ready to be searched. Make one with `NeighbourIndex.open`.

    Safe to use from several threads. Close it, or use it as a context manager.
    """

    def __init__(self, files: IndexFiles, layout: Layout, tokenizer: Tokenizer, keys: Keys) -> None:
        self.layout = layout
        self._files = files
        self._tokenizer = tokenizer
        self._keys: Keys | None = keys
        self._tokens = open_tokens(files, layout)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        tokenizer: Tokenizer,
        tokenizer_hash: str,
        chunk_length: int,
        neighbour_length: int,
        keys: str | Path | None = None,
        *,
        backend: str = "auto",
        device: int = 0,
        threads: int | None = None,
    ) -> Self:
        """Open an index for a model that reads neighbours.

        Args:
            folder: that `planforge index` wrote.
            tokenizer: of the model.
            tokenizer_hash: the sha256 of its file, as the bundle's manifest has it.
            chunk_length: the tokens of a chunk of the model.
            neighbour_length: the tokens of a neighbour.
            keys: the bundle of the encoder that made the keys, where it is no longer where the index says.
            backend: that runs this encoder; see `LoadOptions`, as for the next two.
            device: the GPU's number.
            threads: of the encoder, and of a search of its keys.

        Raises:
            InputError: the index is of another tokenizer, of other lengths, or of another encoder's keys.
            BundleNotFoundError: it is no index.
            ManifestError: it is malformed, empty, or of another format.
            IntegrityError: a file of it is missing, cut, or of another shape.
        """
        folder = Path(folder)
        layout = read_layout(folder)
        check_fit(folder, layout, tokenizer, tokenizer_hash, chunk_length, neighbour_length)
        files = IndexFiles(folder, layout.files)
        engine = EngineOptions(backend, device, threads)
        return cls(files, layout, tokenizer, open_keys(files, layout, tokenizer, keys, engine))

    @cached_property
    def documents(self) -> tuple[str, ...]:
        """The names of the texts."""
        return tuple(document.name for document in self.layout.documents)

    def __len__(self) -> int:
        """Return the number of chunks."""
        return int(self.layout.chunk_mask.sum())

    def find(
        self, chunks: Sequence[Sequence[int]], count: int, without: Collection[str] = ()
    ) -> list[list[Neighbour]]:
        """Return of each chunk the nearest ones of the index, the nearest first.

        Args:
            chunks: of `chunk_length` token ids each.
            count: how many neighbours of each. Two of them never overlap; there are fewer where the index
                has fewer.
            without: names of documents that are left out.

        Raises:
            InputError: a chunk of another length, or a count that is no positive integer.
        """
        check_whole("count", count, 1)
        m = self.layout.chunk_length
        for index, chunk in enumerate(chunks):
            if len(chunk) != m:
                raise InputError(
                    f"chunks[{index}] has {len(chunk)} tokens, and those of the index have {m}",
                    option="chunks",
                )
        keys = self._keys  # read once: another thread may close the index
        if keys is None:
            raise ClosedError("the index was closed; open() it again")
        if not chunks:
            return []
        number = (count - 1) * (2 * self._reach - 1) + 1  # of which so many do not overlap
        nearest = keys.search(keys.compute(chunks), number, self._skip(without))
        return [list(self._choose(found, count)) for found in nearest]

    def measure_overlap(self, text: str | Sequence[int]) -> float:
        """Return the share of the chunks of a text, or of token ids, that the index has almost word by word.

        A chunk counts where its 13-grams and those of a stretch of a document as long as it have a Jaccard
        similarity of 0.8 or more.
        """
        layout = self.layout
        begins = layout.first_rows[:-1] * layout.chunk_length
        spans = np.stack([begins, begins + layout.token_counts], axis=1)
        tokens = self._tokenizer.encode(text) if isinstance(text, str) else text
        return measure_overlap(tokens, self._tokens.reshape(-1), spans, layout.chunk_length)

    def check(self) -> None:
        """Compare the hash of every file with the one that the index was made with."""
        self._files.check()

    def close(self) -> None:
        """Close the encoder, and forget the places that are kept; later searches raise ClosedError.

        The files stay mapped into memory, of which the system takes back what it needs, as long as the object
        is there.
        """
        keys, self._keys = self._keys, None
        if keys is not None:
            keys.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _reach(self) -> int:
        """The rows of a neighbour, the last of which may be used in part."""
        return -(-self.layout.neighbour_length // self.layout.chunk_length)

    def _skip(self, without: Collection[str]) -> npt.NDArray[np.bool_]:
        """Return which rows (R,) are no chunks, or of documents that are left out."""
        skipped = ~self.layout.chunk_mask
        for name in [without] if isinstance(without, str) else without:
            index = self._numbers.get(name)
            if index is not None:
                skipped[self.layout.first_rows[index] : self.layout.first_rows[index + 1]] = True
        return skipped

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The number of each document."""
        return {name: number for number, name in enumerate(self.documents)}

    def _choose(self, nearest: Nearest, count: int) -> Iterator[Neighbour]:
        """Yield the nearest rows that do not overlap."""
        owners = np.searchsorted(self.layout.first_rows, nearest.rows, side="right") - 1
        taken: dict[int, list[int]] = {}
        left = count
        for row, owner, cosine in zip(
            nearest.rows.tolist(), owners.tolist(), nearest.cosines.tolist(), strict=True
        ):
            rows = taken.setdefault(owner, [])
            if any(abs(row - other) < self._reach for other in rows):
                continue
            rows.append(row)
            yield self._make(row, owner, cosine)
            left -= 1
            if left == 0:
                return

    def _make(self, row: int, owner: int, cosine: float) -> Neighbour:
        layout = self.layout
        document = layout.documents[owner]
        start = (row - int(layout.first_rows[owner])) * layout.chunk_length
        end = min(start + layout.neighbour_length, document.tokens)
        place = row * layout.chunk_length
        ids = tuple(self._tokens.reshape(-1)[place : place + end - start].tolist())
        if max(ids) >= layout.vocab_size:
            raise IntegrityError(
                f"{self._files.folder}: tokens.npy has the id {max(ids)}, beyond a vocabulary of"
                f" {layout.vocab_size} tokens; {WAY_OUT}"
            )
        return Neighbour(document.name, start, max(0.0, 1 - cosine), ids, self._tokenizer.decode_known(ids))


def open_tokens(files: IndexFiles, layout: Layout) -> npt.NDArray[Any]:
    """Return the tokens (R, m) of an index."""
    return files.open("tokens.npy", layout.token_type, (layout.rows, layout.chunk_length))


def check_fit(
    folder: Path,
    layout: Layout,
    tokenizer: Tokenizer,
    tokenizer_hash: str,
    chunk_length: int,
    neighbour_length: int,
) -> None:
    """Refuse an index that was made for another model."""
    way_out = "make one for this model with `planforge index TEXTS -o INDEX --for BUNDLE`"
    if layout.tokenizer != tokenizer_hash or layout.vocab_size != tokenizer.vocab_size:
        raise InputError(
            f"{folder} is an index of another tokenizer: its sha256 is {layout.tokenizer[:8]}, and the"
            f" model's {tokenizer_hash[:8]}; {way_out}",
            option="index",
        )
    wanted = (chunk_length, neighbour_length)
    if (layout.chunk_length, layout.neighbour_length) != wanted:
        raise InputError(
            f"{folder} has chunks of {layout.chunk_length} tokens and neighbours of"
            f" {layout.neighbour_length}, and the model reads {chunk_length} and {neighbour_length};"
            f" {way_out}",
            option="index",
        )


def open_keys(
    files: IndexFiles, layout: Layout, tokenizer: Tokenizer, folder: str | Path | None, engine: EngineOptions
) -> Keys:
    """Open the keys of an index, whatever their kind."""
    if layout.keys.kind == "encoder":
        from .encoder_keys import EncoderKeys

        return EncoderKeys(files, layout, tokenizer, folder, engine)
    from .tfidf import TfidfKeys

    if folder is not None:
        raise InputError(
            f"{files.folder} has keys of n-grams, which no encoder made; leave index_keys out",
            option="index_keys",
        )
    return TfidfKeys(files, layout, open_tokens(files, layout))
