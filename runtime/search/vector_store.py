"""Vectors of documents in a folder, which queries of the same model search exactly.

N documents, E width of a vector, Q queries
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..bundle.json_reader import Reader, parse_json
from ..bundle.role_defaults import DOCUMENT, QUERY
from ..encode.results import Hit
from ..encode.similarity import compare_dense
from ..errors import BundleNotFoundError, InputError, IntegrityError, ManifestError
from ..option_checks import check_whole
from .build import record_files, write_whole
from .encoder_keys import multiply, start_threads
from .files import IndexFiles
from .keys import choose_nearest
from .layout import FileRecord, Listing, read_count, read_file

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..encode.text_encoder import TextEncoder

FILE_NAME = "store.json"
KIND = "planforge-vectors"
FORMAT = 1
VECTORS = "vectors.npy"
TEXTS = 1024  # that are embedded at a time
ROWS = 2**14  # that are compared at a time where that needs copies of them
PRODUCTS = ("cosine", "dot")  # functions that are a product, of vectors of length 1 for the first
MAX_BYTES = 2**20
WAY_OUT = "make the store again"
STORE = Listing(FILE_NAME, WAY_OUT)


@dataclass(frozen=True)
class StoreRecord:
    """The content of store.json.

    Attributes:
        export_id: of the bundle that made the vectors, which names what was exported.
        precision: of its graph.
        similarity: how two vectors are compared.
        options: those of `embed` that documents and queries share.
        prompts: a hash of what stands before queries and documents.
        rows: N.
        size: E.
        files: with their sizes and hashes.
    """

    export_id: str
    precision: str
    similarity: str
    options: Mapping[str, Any]
    prompts: str
    rows: int
    size: int
    files: Mapping[str, FileRecord]

    def to_json(self) -> str:
        value = {"kind": KIND, "format": FORMAT, **asdict(self)}
        return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def read(folder: Path) -> StoreRecord:
        """Read a folder's store.json.

        Raises:
            BundleNotFoundError: the folder has none.
            ManifestError: it is malformed, or of another format.
        """
        path = folder / FILE_NAME
        if not path.is_file():
            raise BundleNotFoundError(f"{folder} is no store of vectors: it has no {FILE_NAME}")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES)
        try:
            value = parse_json(content.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{path} is not valid JSON: {error}; {WAY_OUT}") from error
        try:
            return StoreRecord.from_json(value)
        except (ManifestError, IntegrityError) as error:
            raise type(error)(f"{folder}: {error}") from error

    @staticmethod
    def from_json(value: Any) -> StoreRecord:
        """Return the record of a store.json's value."""
        reader = Reader(value, "store", FILE_NAME)
        if reader.value.get("kind") != KIND or reader.get("format", int) != FORMAT:
            raise ManifestError(f"{FILE_NAME} is not that of a store that this version reads; {WAY_OUT}")
        files = reader.get("files", dict)
        return StoreRecord(
            export_id=reader.get("export_id", str),
            precision=reader.get("precision", str),
            similarity=reader.get("similarity", str),
            options=read_options(reader.get("options", dict)),
            prompts=reader.get("prompts", str),
            rows=read_count(reader, "rows", 1, 2**40, STORE),
            size=read_count(reader, "size", 1, 2**16, STORE),
            files={name: read_file(name, record, STORE) for name, record in files.items()},
        )


def read_options(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `embed` that a store.json names; refuse others."""
    reader = Reader(value, "store.options", FILE_NAME)
    if unknown := set(value) - {"normalize", "truncate_dim"}:
        raise ManifestError(f"{FILE_NAME} has the option {min(unknown)!r:.60}; {WAY_OUT}")
    return {
        "normalize": None if value.get("normalize") is None else reader.flag("normalize"),
        "truncate_dim": reader.get("truncate_dim", int, None),
    }


def write_store(
    model: TextEncoder,
    texts: Iterable[str],
    folder: str | Path,
    *,
    normalize: bool | None = None,
    truncate_dim: int | None = None,
    force: bool = False,
) -> int:
    """Embed documents, and write their vectors to a folder that is there whole or not at all.

    Args:
        model: loaded from a bundle.
        texts: of the documents; hits name them by their numbers.
        folder: where the store will be.
        normalize, truncate_dim: as those of `TextEncoder.embed`, for queries too.
        force: replace a store that is there.

    Returns:
        The number of documents.

    Raises:
        InputError: no text, one text alone, a model that embeds none, or a folder that exists.
    """
    folder = Path(folder)
    check_model(model)
    if isinstance(texts, str):
        raise InputError("texts is one text, and a store has several: give a list", option="texts")
    check_output(folder, force)
    options = {"normalize": normalize, "truncate_dim": truncate_dim}
    waiting = iter(texts)
    count = 0
    with write_whole(folder, lambda: check_output(folder, force)) as staging:
        path = staging / VECTORS
        with path.open("wb") as file:
            size = 0
            while part := list(islice(waiting, TEXTS)):
                vectors = embed(model, part, DOCUMENT, options)
                if not count:
                    size = vectors.shape[1]
                    write_header(file, 0, size)
                file.write(vectors.tobytes())
                count += len(part)
            if not count:
                raise InputError("there are no texts; give at least one", option="texts")
            file.seek(0)
            write_header(file, count, size)
        record = StoreRecord(
            model.bundle.manifest.export_id,
            model.artifact.precision,
            model.defaults.roles.similarity,
            options,
            hash_prompts(model),
            count,
            size,
            record_files(staging),
        )
        (staging / FILE_NAME).write_text(record.to_json(), encoding="utf-8", newline="\n")
    return count


def write_header(file: Any, rows: int, size: int) -> None:
    """Write the beginning of a .npy file, which has the same length for any number of rows."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (rows, size)}
    np.lib.format.write_array_header_1_0(file, header)


def check_model(model: object) -> None:
    """Refuse a model that gives texts no vectors."""
    if not hasattr(model, "embed"):
        raise InputError(
            "a store belongs to a model that embeds texts, TextEncoder.load(BUNDLE), not to a"
            f" {type(model).__name__}"
        )


def check_output(folder: Path, force: bool) -> None:
    """Refuse a folder that is no store, and a store unless it may be replaced."""
    if not (folder.exists() or folder.is_symlink()):
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    if names - {FILE_NAME, VECTORS} or FILE_NAME not in names:
        raise InputError(f"{folder} exists and is no store of vectors, so it is left alone")
    if not force:
        raise InputError(f"{folder} exists; pass force=True to replace it")


def embed(
    model: TextEncoder, texts: list[str], input_type: str, options: Mapping[str, Any]
) -> npt.NDArray[np.float32]:
    """Return the vectors (N, E) of texts of a type."""
    kind: Any = input_type
    vectors = model.embed(texts, input_type=kind, truncation="head", **options)
    return np.ascontiguousarray(vectors, "<f4")


def hash_prompts(model: TextEncoder) -> str:
    """Return what is another where queries or documents are read in another way."""
    defaults = model.defaults
    told = json.dumps([defaults.prompts, defaults.default_prompt, asdict(defaults.roles)], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


class VectorStore:
    """The vectors of documents, memory-mapped. Make one with `write_store`, and open it with `open`."""

    def __init__(self, model: TextEncoder, record: StoreRecord, files: IndexFiles) -> None:
        self.model = model
        self.record = record
        self.vectors = files.open(VECTORS, np.float32, (record.rows, record.size))
        self._files = files
        self._threads = start_threads()

    @classmethod
    def open(cls, folder: str | Path, model: TextEncoder) -> Self:
        """Open a store for the model that made it.

        Raises:
            InputError: another model made it, in another precision, or it reads texts in another way; or the
                model embeds no texts.
            BundleNotFoundError, ManifestError, IntegrityError: the folder is no store, or a damaged one.
        """
        folder = Path(folder)
        check_model(model)
        record = StoreRecord.read(folder)
        given = {
            "export": (record.export_id, model.bundle.manifest.export_id),
            "precision": (record.precision, model.artifact.precision),
            "way to read texts": (record.prompts, hash_prompts(model)),
        }
        for what, (own, other) in given.items():
            if own != other:
                raise InputError(
                    f"{folder} has vectors of another {what} ({own[:8]}) than the model's ({other[:8]}); load"
                    f" the bundle that made them, or {WAY_OUT}"
                )
        return cls(model, record, IndexFiles(folder, record.files, STORE))

    def __len__(self) -> int:
        """Return the number of documents."""
        return self.record.rows

    def search(self, queries: str | Iterable[str], top_k: int = 10) -> Any:
        """Return the documents that are most like each query, the best first.

        Args:
            queries: one, or several.
            top_k: how many documents of each.

        Returns:
            A list of `Hit`, whose texts are None; of several queries a list of lists.
        """
        check_whole("top_k", top_k, 1)
        many = [queries] if isinstance(queries, str) else list(queries)
        found = self._search(embed(self.model, many, QUERY, self.record.options), top_k) if many else []
        return found[0] if isinstance(queries, str) else found

    def _search(self, queries: npt.NDArray[np.float32], top_k: int) -> list[list[Hit]]:
        """Return the hits of each vector (Q, E)."""
        nothing = np.zeros(len(self), np.bool_)
        found = []
        for query in queries:
            scores = self._compare(query[None])[0]
            nearest = choose_nearest(scores, top_k, nothing)
            pairs = zip(nearest.rows.tolist(), nearest.cosines.tolist(), strict=True)
            found.append([Hit(row, score) for row, score in pairs])
        return found

    def _compare(self, query: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return how alike a vector (1, E) is to each document, (1, N)."""
        is_unit = self.record.options["normalize"] is not False and self.model.defaults.normalize
        if self.record.similarity == "dot" or (self.record.similarity == "cosine" and is_unit):
            return multiply(query, self.vectors, self._threads)
        starts = range(0, len(self), ROWS)
        parts = [compare_dense(query, self.vectors[at : at + ROWS], self.record.similarity) for at in starts]
        return np.concatenate(parts, axis=1)

    def check(self) -> None:
        """Compare the hash of every file with the one that the store was made with."""
        self._files.check()
