"""What a job is made of: the input's files cut into parts, each of which is computed and written as a whole.

The plan is a file of JSON lines, made once. A part's rows are the same whenever and wherever it is computed,
so that a job which was interrupted goes on with the parts whose files are not there.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pyarrow.fs import FileInfo, FileType

from ...errors import BatchError, InputError
from .formats import KINDS, READ_BYTES, ROW_RANGE_BYTES, find_suffix, open_table
from .storage import JOB, Storage
from .table_file import RowRange, TableFile

PLAN = f"{JOB}/plan.jsonl"
PACKED = (".gz", ".bz2", ".zst", ".xz", ".zip", ".lz4")


@dataclass(frozen=True)
class Part:
    """Rows that are computed and written together.

    Attributes:
        number: counts from 0.
        row_ranges: where its rows are, in their order.
    """

    number: int
    row_ranges: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return sum(row_range.rows for row_range in self.row_ranges)

    @property
    def file(self) -> str:
        """The name of its file in the output's folder."""
        return f"part-{self.number:06d}.parquet"

    def to_json(self) -> str:
        return json.dumps([self.number, *self.row_ranges])

    @classmethod
    def from_json(cls, line: str) -> Part:
        number, *row_ranges = json.loads(line)
        return cls(number, tuple(RowRange(*row_range) for row_range in row_ranges))


@dataclass(frozen=True)
class PlanSummary:
    """How much a plan has.

    Attributes:
        fingerprint: of the input's names, sizes and times of change: another one means another input.
        hash: of the plan itself.
    """

    files: int
    parts: int
    rows: int
    fingerprint: str
    hash: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Source:
    """Where a job's rows come from.

    Attributes:
        storage: a folder, or a file.
        is_file: whether it is a file.
    """

    storage: Storage
    is_file: bool

    @classmethod
    def of(cls, address: str | Path) -> Source:
        """Return the source of a path or URI; refuse one where nothing is."""
        storage = Storage.of(address)
        kind = storage.find_type()
        if kind == FileType.NotFound:
            raise InputError(f"--input {storage} does not exist", option="input")
        if kind == FileType.Unknown:
            raise InputError(f"--input {storage} is neither a file nor a folder", option="input")
        return cls(storage, bool(kind == FileType.File))

    def name(self, path: str) -> str:
        """Return a file's path below the folder, which ids are made of; of a source that is one, its name."""
        return PurePosixPath(path).name if self.is_file else path.removeprefix(self.storage.path).strip("/")

    def path(self, name: str) -> str:
        """Return the path of a file that has a name."""
        return self.storage.path if self.is_file else self.storage.join(name)

    def list_files(self) -> list[FileInfo]:
        """Return its files, sorted by their paths; refuse to have none."""
        storage = self.storage
        if self.is_file:
            files = [storage.files.get_file_info(storage.path)]
        else:
            files = storage.list_files(self._is_table)
        for file in files:
            if find_suffix(file.path) in PACKED:
                raise InputError(f"--input: {file.path} is compressed; decompress it first", option="input")
        usable = [file for file in files if find_suffix(file.path) in KINDS]
        if not usable:
            raise InputError(
                f"--input {storage} has no file of a supported type: {', '.join(KINDS)}", option="input"
            )
        return sorted(usable, key=lambda file: str(file.path))

    def _is_table(self, path: str) -> bool:
        """Return whether a path is that of a table, and neither it nor a folder that it is in is hidden."""
        hidden = any(part.startswith((".", "_")) for part in self.name(path).split("/"))
        return not hidden and find_suffix(path) in (*KINDS, *PACKED)

    def open_table(self, name: str) -> TableFile:
        """Return the file that has a name."""
        return open_table(self.storage, self.path(name))


def make_fingerprint(source: Source, files: Sequence[FileInfo]) -> str:
    """Return a text that is another one when a file was added, removed or changed."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{source.name(file.path)}\0{file.size}\0{file.mtime_ns}\n".encode())
    return digest.hexdigest()


def write_plan(
    source: Source,
    output: Storage,
    columns: Sequence[str],
    rows_per_part: int,
    report: Callable[[int, int], None],
) -> PlanSummary:
    """Cut the input into parts, and write the plan; memory does not grow with the input."""
    files = source.list_files()
    for file in files:
        open_table(source.storage, file.path).check(columns)
    parts = rows = 0
    digest = hashlib.sha256()
    with output.write_parts(PLAN) as stream:
        for part in make_parts(source, files, rows_per_part, report):
            line = f"{part.to_json()}\n".encode()
            digest.update(line)
            stream.write(line)
            parts += 1
            rows += part.rows
        if not rows:
            raise InputError(f"--input {source.storage} has no rows", option="input")
    return PlanSummary(len(files), parts, rows, make_fingerprint(source, files), digest.hexdigest())


def make_parts(
    source: Source, files: Sequence[FileInfo], rows_per_part: int, report: Callable[[int, int], None]
) -> Iterator[Part]:
    """Yield parts of a number of rows; small files share one, and the last has what is left."""
    number = rows = size = 0
    row_ranges: list[RowRange] = []
    for count, file in enumerate(files):
        report(count, len(files))
        name = source.name(file.path)
        for place in open_table(source.storage, file.path).cut(rows_per_part):
            row_range = RowRange(name, *place)
            if rows and (rows + row_range.rows > rows_per_part or size + row_range.size > ROW_RANGE_BYTES):
                yield Part(number, tuple(row_ranges))
                number += 1
                rows = size = 0
                row_ranges = []
            row_ranges.append(row_range)
            rows += row_range.rows
            size += row_range.size
    if rows:
        yield Part(number, tuple(row_ranges))
    report(len(files), len(files))


def read_plan(output: Storage, wanted_hash: str) -> Iterator[Part]:
    """Yield a job's parts, one at a time; at the end refuse a plan that is not the one that was made."""
    damaged = BatchError(f"{output.join(PLAN)} is damaged; delete the folder, and run the job again")
    digest = hashlib.sha256()
    with output.files.open_input_stream(output.join(PLAN), compression=None) as stream:
        for line in io.BufferedReader(stream, READ_BYTES):
            digest.update(line)
            try:
                part = Part.from_json(line.decode())
            except (ValueError, TypeError) as error:
                raise damaged from error
            yield part
    if digest.hexdigest() != wanted_hash:
        raise damaged
