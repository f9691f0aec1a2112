"""index.json: what an index of texts holds, as frozen dataclasses that read and write plain JSON.

The file may come from anywhere: each field is checked, and no name in it leads out of the index's folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..bundle.json_reader import Reader, parse_json
from ..bundle.retrieval_defaults import MAX_LENGTH
from ..errors import BundleNotFoundError, IntegrityError, ManifestError

FILE_NAME = "index.json"
FORMAT = 1
KIND = "planforge-index"
MAX_BYTES = 64 * 2**20
MAX_TOKENS = 2**40
MAX_VOCABULARY = 2**24
WAY_OUT = "make the index again with `planforge index`"
FILES = re.compile(r"[a-z_]+\.(npy|faiss)")
OWN_FILES = frozenset({FILE_NAME, "tokens.npy", "keys.npy", "keys.faiss", "norms.npy"}) | {
    f"{name}.npy" for name in ("starts", "places", "frequent", "counts", "offsets")
}
HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Listing:
    """The file that lists the arrays of a folder, and the way out where the two do not fit."""

    file: str
    way_out: str


INDEX = Listing(FILE_NAME, WAY_OUT)


@dataclass(frozen=True)
class Document:
    """One text of an index.

    Attributes:
        name: by which it is left out of a search.
        tokens: how many it has.
    """

    name: str
    tokens: int


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class KeysRecord:
    """Says what the keys are.

    Attributes:
        kind: "tfidf" or "encoder".
        folder: of the bundle whose encoder made them; "" without one.
        export_id: of that bundle, which names what was exported.
        precision: of the encoder.
        size: of a key; 0 of keys that are no vectors.
    """

    kind: str
    folder: str = ""
    export_id: str = ""
    precision: str = ""
    size: int = 0


@dataclass(frozen=True)
class Layout:
    """The content of index.json.

    Each text begins a row of `chunk_length` tokens, and its last row is padded by `vocab_size`, which is no
    token. A row is a chunk unless less than half of it is text.
    """

    chunk_length: int
    neighbour_length: int
    tokenizer: str
    vocab_size: int
    keys: KeysRecord
    documents: tuple[Document, ...]
    files: Mapping[str, FileRecord]

    @cached_property
    def token_counts(self) -> npt.NDArray[np.int64]:
        """The tokens of each text."""
        return np.array([document.tokens for document in self.documents], np.int64)

    @cached_property
    def first_rows(self) -> npt.NDArray[np.int64]:
        """The first row of each text, and behind them the number of all rows."""
        counts = -(-self.token_counts // self.chunk_length)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.first_rows[-1])

    @cached_property
    def chunk_mask(self) -> npt.NDArray[np.bool_]:
        """Tell of each row whether it is a chunk."""
        mask = np.ones(self.rows, np.bool_)
        rest = self.token_counts % self.chunk_length
        dropped = (rest > 0) & (2 * rest < self.chunk_length)
        mask[self.first_rows[1:][dropped] - 1] = False
        return mask

    @property
    def token_type(self) -> np.dtype[Any]:
        """The smallest type that holds the ids and the padding."""
        return np.min_scalar_type(self.vocab_size)

    def to_json(self) -> str:
        value = {"kind": KIND, "format": FORMAT, **asdict(self)}
        value["files"] = {name: asdict(record) for name, record in sorted(self.files.items())}
        return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Layout:
        try:
            reader = Reader(parse_json(text), "index", FILE_NAME)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{FILE_NAME} is not valid JSON: {error}; {WAY_OUT}") from error
        if reader.value.get("kind") != KIND:
            raise ManifestError(f"{FILE_NAME} is not that of an index that `planforge index` made")
        found = reader.get("format", int)
        if found != FORMAT:
            raise ManifestError(
                f"{FILE_NAME} has format {found}; this version of PlanForge reads format {FORMAT}. Use the"
                f" version that wrote it, or {WAY_OUT}"
            )
        layout = Layout(
            chunk_length=read_count(reader, "chunk_length", 2, MAX_LENGTH),
            neighbour_length=read_count(reader, "neighbour_length", 2, MAX_LENGTH),
            tokenizer=read_hash(reader, "tokenizer"),
            vocab_size=read_count(reader, "vocab_size", 1, MAX_VOCABULARY),
            keys=read_keys(Reader(reader.get("keys", dict), "keys", FILE_NAME)),
            documents=read_documents(reader.get("documents", list)),
            files={name: read_file(name, value) for name, value in reader.get("files", dict).items()},
        )
        layout.check_documents()
        return layout

    def check_documents(self) -> None:
        """Refuse an index without chunks, and numbers of tokens that no disk holds."""
        names = [document.name for document in self.documents]
        if len(set(names)) < len(names):
            raise ManifestError(f"{FILE_NAME} names a document twice; {WAY_OUT}")
        total = sum(document.tokens for document in self.documents)
        if total > MAX_TOKENS:
            raise ManifestError(f"{FILE_NAME} says {total} tokens, more than {MAX_TOKENS}; {WAY_OUT}")
        tokens = self.files.get("tokens.npy")
        stored = 0 if tokens is None else tokens.bytes // self.token_type.itemsize
        if self.rows * self.chunk_length > stored:
            raise ManifestError(f"{FILE_NAME} says {total} tokens, and tokens.npy has fewer; {WAY_OUT}")
        if not self.chunk_mask.any():
            raise ManifestError(f"the index is empty: none of its texts has a chunk; {WAY_OUT}")


def read_count(reader: Reader, name: str, least: int, most: int, listing: Listing = INDEX) -> int:
    """Return a whole number that lies in its range."""
    value = reader.get(name, int)
    if not least <= value <= most:
        raise ManifestError(
            f"{listing.file}: {reader.what}.{name} is {value}, and must be {least} to {most};"
            f" {listing.way_out}"
        )
    return value


def read_hash(reader: Reader, name: str, listing: Listing = INDEX) -> str:
    value = reader.get(name, str)
    if not HASH.fullmatch(value):
        raise ManifestError(f"{listing.file}: {reader.what}.{name} is not a sha256; {listing.way_out}")
    return value


def read_keys(reader: Reader) -> KeysRecord:
    kind = reader.get("kind", str)
    if kind == "tfidf":
        return KeysRecord(kind)
    if kind != "encoder":
        raise ManifestError(
            f"{FILE_NAME} has keys of the kind {kind!r:.60}; this version reads tfidf and encoder"
        )
    return KeysRecord(
        kind=kind,
        folder=reader.get("folder", str),
        export_id=reader.get("export_id", str),
        precision=reader.get("precision", str),
        size=read_count(reader, "size", 1, 2**16),
    )


def read_documents(values: list[Any]) -> tuple[Document, ...]:
    documents = []
    for index, value in enumerate(values):
        reader = Reader(value, f"documents[{index}]", FILE_NAME)
        documents.append(Document(reader.get("name", str), read_count(reader, "tokens", 1, MAX_TOKENS)))
    return tuple(documents)


def read_file(name: str, value: Any, listing: Listing = INDEX) -> FileRecord:
    if not FILES.fullmatch(name):
        raise IntegrityError(f"{listing.file} names {name!r:.80}, which is not a file of an array")
    reader = Reader(value, f"files[{name!r}]", listing.file)
    size = read_count(reader, "bytes", 1, 2**50, listing)
    return FileRecord(size, read_hash(reader, "sha256", listing))


def read_layout(folder: Path) -> Layout:
    """Return the content of an index's index.json.

    Raises:
        BundleNotFoundError: it is no index.
        ManifestError: it is malformed, empty, or of another format.
    """
    path = folder / FILE_NAME
    if folder.is_file():
        raise BundleNotFoundError(
            f"{folder} is a file, and an index is a folder; give the one that `planforge index` wrote"
            + (f", {folder.parent}" if folder.name == FILE_NAME else "")
        )
    if not folder.is_dir():
        raise BundleNotFoundError(
            f"there is no folder {folder}; give the index that `planforge index` wrote there, or make one"
        )
    if not path.is_file():
        raise BundleNotFoundError(
            f"{folder} is not an index: it has no {FILE_NAME}; `planforge index` makes one"
        )
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ManifestError(f"{path} has more than {MAX_BYTES} bytes; {WAY_OUT}")
    try:
        return Layout.from_json(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path} is not UTF-8: {error}; {WAY_OUT}") from error
    except (ManifestError, IntegrityError) as error:
        raise type(error)(f"{folder}: {error}") from error
