"""Makes an index of texts: a folder that is written whole or not at all.

R rows of an index, m tokens of a row
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..bundle.bundle import compute_sha256
from ..bundle.retrieval_defaults import MAX_LENGTH
from ..errors import BundleError, InputError
from ..option_checks import check_whole
from ..text.tokenizer import Tokenizer
from .layout import (
    FILE_NAME,
    FORMAT,
    HASH,
    KIND,
    OWN_FILES,
    Document,
    FileRecord,
    KeysRecord,
    Layout,
    read_layout,
)

if TYPE_CHECKING:
    from ..encode.text_encoder import TextEncoder

Progress = Callable[[str, int, int], None]  # takes the stage, how much of it is done, and how much there is
Texts = Mapping[str, str] | Iterable[tuple[str, str]]


class IndexCounts(NamedTuple):
    """What an index has.

    Attributes:
        documents: texts.
        chunks: of them, that are found.
        tokens: of all texts.
        bytes: of all files.
    """

    documents: int
    chunks: int
    tokens: int
    bytes: int


def report_nothing(stage: str, done: int, total: int) -> None:
    """Take a report, and do nothing."""


def build_index(
    texts: Texts,
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    tokenizer_hash: str,
    chunk_length: int,
    neighbour_length: int,
    keys: TextEncoder | None = None,
    force: bool = False,
    progress: Progress = report_nothing,
) -> IndexCounts:
    """Write an index of texts.

    Args:
        texts: by their names, or pairs of a name and a text, which are read one by one.
        folder: where it will be.
        tokenizer: of the model that will read neighbours.
        tokenizer_hash: the sha256 of its file.
        chunk_length: the tokens of a chunk.
        neighbour_length: the tokens of a chunk and what follows it.
        keys: an encoder that was loaded from its bundle and makes the keys; by default they are n-grams.
        force: replace an index that is there.
        progress: told of each stage, and how much of it is done.

    Raises:
        InputError: no text, an empty one, a name that is there twice, or a folder that exists and is not an
            index alone.
    """
    folder = Path(folder)
    check_whole("chunk_length", chunk_length, 2, MAX_LENGTH)
    check_whole("neighbour_length", neighbour_length, chunk_length, MAX_LENGTH)
    if not HASH.fullmatch(tokenizer_hash):
        raise InputError(f"tokenizer_hash={tokenizer_hash!r:.80} is not a sha256", option="tokenizer_hash")
    check_output(folder, force)
    pairs = texts.items() if isinstance(texts, Mapping) else texts
    documents, tokens = read_texts(pairs, tokenizer, chunk_length, progress)
    layout = Layout(
        chunk_length=chunk_length,
        neighbour_length=neighbour_length,
        tokenizer=tokenizer_hash,
        vocab_size=tokenizer.vocab_size,
        keys=KeysRecord("tfidf"),
        documents=tuple(documents),
        files={},
    )
    if not layout.chunk_mask.any():
        raise InputError(
            f"the texts have no chunk: each has less than half of {chunk_length} tokens; give longer ones",
            option="texts",
        )
    with write_whole(folder, lambda: check_output(folder, force)) as staging:
        np.save(staging / "tokens.npy", tokens, allow_pickle=False)
        written = write_keys(staging, layout, tokens, tokenizer, keys, progress)
        files = record_files(staging)
        text = replace(written, files=files).to_json()
        (staging / FILE_NAME).write_text(text, encoding="utf-8", newline="\n")
    size = sum(record.bytes for record in files.values()) + len(text.encode())
    total = int(layout.token_counts.sum())
    return IndexCounts(len(documents), int(layout.chunk_mask.sum()), total, size)


def read_texts(
    pairs: Iterable[tuple[str, str]], tokenizer: Tokenizer, chunk_length: int, progress: Progress
) -> tuple[list[Document], npt.NDArray[Any]]:
    """Return the documents, and their tokens in rows (R, m)."""
    padding = tokenizer.vocab_size
    dtype = np.min_scalar_type(padding)
    documents: list[Document] = []
    parts: list[npt.NDArray[Any]] = []
    names: set[str] = set()
    for name, text in pairs:
        progress("reading", len(documents), len(documents) + 1)
        check_name(name, text)
        if name in names:
            raise InputError(f"two texts have the name {name!r:.200}; give each its own", option="texts")
        names.add(name)
        if not text.strip():
            raise InputError(f"{name} is empty; leave it out", option="texts")
        ids = tokenizer.encode(text)
        if not ids:
            raise InputError(f"{name} has no tokens; leave it out", option="texts")
        rows = np.full((-(-len(ids) // chunk_length), chunk_length), padding, dtype)
        rows.reshape(-1)[: len(ids)] = ids
        documents.append(Document(name, len(ids)))
        parts.append(rows)
    if not documents:
        raise InputError("there are no texts; give at least one", option="texts")
    progress("reading", len(documents), len(documents))
    return documents, np.concatenate(parts)


def check_name(name: str, text: str) -> None:
    """Refuse a text without a name that index.json can hold."""
    if not isinstance(name, str) or not isinstance(text, str):
        kinds = (type(name).__name__, type(text).__name__)
        raise InputError(f"texts are pairs of str, a name and a text, not of {kinds}", option="texts")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the name {name!r:.200} is not UTF-8; rename the file", option="texts") from error


def write_keys(
    staging: Path,
    layout: Layout,
    tokens: npt.NDArray[Any],
    tokenizer: Tokenizer,
    encoder: TextEncoder | None,
    progress: Progress,
) -> Layout:
    """Write the keys of an index; return its layout with what they are."""

    def tell(done: int, total: int) -> None:
        progress("making keys", done, total)

    def decode(begin: int, end: int) -> list[str]:
        return [tokenizer.decode_known(row) for row in tokens[begin:end].tolist()]

    if encoder is None:
        from .tfidf import write_tfidf

        write_tfidf(staging, layout, tokens, tell)
        return layout
    from .encoder_keys import describe_encoder, write_vectors

    size = write_vectors(staging, layout, decode, encoder, tell)
    return replace(layout, keys=describe_encoder(encoder, size))


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Return the size and the hash of each file, after it is on the disk."""
    records = {}
    for path in sorted(folder.iterdir()):
        with path.open("r+b") as file:
            os.fsync(file.fileno())
        records[path.name] = FileRecord(path.stat().st_size, compute_sha256(path))
    return records


def check_output(folder: Path, force: bool) -> None:
    """Refuse to overwrite what is no index or has other files, and an index unless that is asked for."""
    if not (folder.exists() or folder.is_symlink()):
        return
    try:
        read_layout(folder)
    except BundleError as error:
        if not is_index(folder):
            raise InputError(
                f"{folder} exists and is not an index that this version reads, so it is left alone; choose"
                " another folder"
            ) from error
    if not force:
        raise InputError(f"{folder} exists; pass --force (in Python force=True) to replace it")
    others = sorted(path.name for path in folder.iterdir() if path.name not in OWN_FILES or path.is_dir())
    if others:
        raise InputError(
            f"{folder} has {others[0]!r:.200}, which is no file of an index and would be lost; move it out,"
            " or choose another folder"
        )


def check_apart(output: Path, files: Iterable[Path]) -> None:
    """Refuse to read texts from the folder that will be replaced."""
    place = os.path.realpath(output)
    for path in files:
        if Path(os.path.realpath(path)).is_relative_to(place):
            raise InputError(
                f"the text {path} lies in {output}, where the index will be; choose another folder for the"
                " index",
                option="texts",
            )


def is_index(folder: Path) -> bool:
    """Tell whether a folder holds what was an index, although it cannot be read."""
    marks = (f'"kind": "{KIND}"', f'"format": {FORMAT}')
    try:
        start = (folder / FILE_NAME).read_text(encoding="utf-8", errors="replace")[:200]
    except OSError:
        return False
    return all(mark in start for mark in marks)


@contextmanager
def write_whole(folder: Path, check: Callable[[], None]) -> Iterator[Path]:
    """Yield a folder to write in, which gets the name of `folder` when all is written and checked."""
    folder = Path(os.path.realpath(folder))  # a link to an index stays one
    name = f".{folder.name}.partial-{secrets.token_hex(6)}"
    partial = folder.with_name(name)
    old = folder.with_name(f"{name}-old")
    try:
        partial.mkdir(parents=True)
        yield partial
        check()  # what came in while it was made
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    except BaseException as error:
        if old.exists() and not folder.exists():
            old.rename(folder)
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise InputError(f"{folder} cannot be written: {reason}; nothing was changed") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
