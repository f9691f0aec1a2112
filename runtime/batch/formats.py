"""The kinds of files that a job reads, each cut into stretches of rows that can be read by themselves.

A row's number is its place in the file: of a text or of JSON lines its line, from 0.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import PurePosixPath
from typing import IO, Any, ClassVar, NamedTuple, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import InputError
from .storage import Storage
from .values import list_values

READ_BYTES = 2**20  # at a time
RECORD_BYTES = 16 * 2**20  # of a line, or of a record of CSV that goes over several
MARK = b"\xef\xbb\xbf"  # that some programs put at the beginning of UTF-8


class Stretch(NamedTuple):
    """Rows of a file that follow one another.

    Attributes:
        file: its path below the input's folder.
        first: the number of the first row.
        rows: how many.
        offset: the first byte; 0 of Parquet.
        size: the bytes; 0 of Parquet.
    """

    file: str
    first: int
    rows: int
    offset: int
    size: int


class Record(NamedTuple):
    """A line of a stream, or a record of CSV: its number, its bytes from begin to end, and its text."""

    number: int
    begin: int
    end: int
    text: bytes


class Row(NamedTuple):
    """A row: the values of the columns that were asked for, or why it has none."""

    number: int
    values: tuple[Any, ...]
    error: str | None = None


class TableFile(Protocol):
    """A file of rows; it keeps what the next stretch may need."""

    def __init__(self, storage: Storage, path: str) -> None: ...

    def check(self, columns: Sequence[str]) -> None:
        """Refuse a file that lacks one of the columns."""

    def cut(self, rows: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield first, rows, offset and size of stretches of at most so many rows."""

    def read(self, stretch: Stretch, columns: Sequence[str]) -> Iterator[Row]:
        """Yield the rows of a stretch."""


class LineFile:
    """A file of lines; blank ones are no rows."""

    FIRST: ClassVar[int] = 0  # the number of the file's first record

    def __init__(self, storage: Storage, path: str) -> None:
        self.storage = storage
        self.path = path

    def check(self, columns: Sequence[str]) -> None:
        """Refuse nothing: each line is looked at when it is read."""

    def cut(self, rows: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield stretches of whole records."""
        first = count = begin = end = 0
        with self.storage.files.open_input_stream(self.path, compression=None) as stream:
            for record in self.iterate_records(stream, self.FIRST):
                if record.number < 0:
                    continue  # a header
                if count == rows:
                    yield first, count, begin, end - begin
                    count = 0
                if count == 0:
                    first = record.number
                    begin = record.begin
                count += 1
                end = record.end
        if count:
            yield first, count, begin, end - begin

    def read(self, stretch: Stretch, columns: Sequence[str]) -> Iterator[Row]:
        """Yield the rows of a stretch."""
        with self.storage.files.open_input_file(self.path) as stream:
            stream.seek(stretch.offset)
            data = io.BytesIO(stream.read(stretch.size))
        for record in self.iterate_records(data, stretch.first):
            text = record.text.removeprefix(MARK) if record.number == 0 else record.text
            try:
                yield Row(record.number, self.parse(text, columns))
            except InputError as error:
                yield Row(record.number, (), str(error))

    def iterate_records(self, stream: IO[bytes], first: int) -> Iterator[Record]:
        """Yield the lines that are not blank."""
        begin = 0
        for number, line in enumerate(iterate_lines(stream, self.path), first):
            if line.strip():
                yield Record(number, begin, begin + len(line), line.rstrip(b"\r\n"))
            begin += len(line)

    def parse(self, text: bytes, columns: Sequence[str]) -> tuple[Any, ...]:
        """Return the values of a record."""
        raise NotImplementedError


class TextFile(LineFile):
    """Text: a line is a row, and its only column "text"."""

    def check(self, columns: Sequence[str]) -> None:
        """Refuse more than one column."""
        if len(columns) > 1:
            raise InputError(
                f"{self.path}: lines of text have one column, not {', '.join(columns)}; use JSON lines"
            )

    def parse(self, text: bytes, columns: Sequence[str]) -> tuple[Any, ...]:
        """Return the line."""
        return (text,)


class JsonLinesFile(LineFile):
    """JSON lines: an object for each row."""

    def parse(self, text: bytes, columns: Sequence[str]) -> tuple[Any, ...]:
        """Return the values of the object's keys; None of one that it lacks."""
        try:
            value = json.loads(text.decode())
        except UnicodeDecodeError as error:
            byte = f"byte {error.start + 1} is 0x{text[error.start]:02x}"
            raise InputError(f"the line is not UTF-8: {byte}") from error
        except (ValueError, RecursionError) as error:  # the latter: nested thousands deep
            raise InputError(f"the line is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise InputError(f"the line is no JSON object: {text.decode():.80}")
        return tuple(map(value.get, columns))


class CsvFile(LineFile):
    """CSV: the first record names the columns; a quoted field may go over several lines."""

    FIRST = -1

    @cached_property
    def header(self) -> list[str]:
        """The names in the first record."""
        with self.storage.files.open_input_stream(self.path, compression=None) as stream:
            first = next(self.iterate_records(stream, self.FIRST), None)
        if first is None:
            raise InputError(f"{self.path} is empty; its first line must name the columns")
        return split_record(first.text.removeprefix(MARK))

    def check(self, columns: Sequence[str]) -> None:
        """Refuse a file whose first record lacks one of the columns."""
        check_columns(self.path, self.header, columns)

    def iterate_records(self, stream: IO[bytes], first: int) -> Iterator[Record]:
        """Yield the records that are not blank."""
        number = first
        begin = size = 0
        lines: list[bytes] = []
        is_quoted = False  # whether a line ended inside a quoted field
        for line in iterate_lines(stream, self.path):
            lines.append(line)
            size += len(line)
            if size > RECORD_BYTES:
                raise InputError(
                    f"{self.path}: record {number} has over {RECORD_BYTES:,} bytes; is a quote open?"
                )
            is_quoted ^= line.count(b'"') % 2 == 1
            if is_quoted:
                continue
            if size > len(lines[0]) or line.strip():
                yield Record(number, begin, begin + size, b"".join(lines).rstrip(b"\r\n"))
                number += 1
            begin += size
            size = 0
            lines = []
        if lines:
            yield Record(number, begin, begin + size, b"".join(lines))

    def parse(self, text: bytes, columns: Sequence[str]) -> tuple[Any, ...]:
        """Return the record's fields as bytes, which need not be UTF-8."""
        header = self.header
        fields = split_record(text)
        if len(fields) != len(header):
            raise InputError(f"the record has {len(fields)} fields, the first line of the file {len(header)}")
        return tuple(fields[header.index(column)].encode(errors="surrogateescape") for column in columns)


class ParquetFile:
    """Parquet: row groups are read one at a time, and of them the columns that are asked for."""

    def __init__(self, storage: Storage, path: str) -> None:
        self.storage = storage
        self.path = path
        self._group: tuple[int, tuple[str, ...], pa.Table] | None = None  # that was read last

    @cached_property
    def file(self) -> pq.ParquetFile:
        """The open file."""
        try:
            return pq.ParquetFile(self.path, filesystem=self.storage.files)
        except pa.ArrowInvalid as error:
            raise InputError(f"{self.path} is no Parquet file: {error}") from error

    def check(self, columns: Sequence[str]) -> None:
        """Refuse a file that lacks one of the columns, or is no Parquet."""
        check_columns(self.path, self.file.schema_arrow.names, columns)

    def cut(self, rows: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield stretches of rows."""
        count = self.file.metadata.num_rows
        for first in range(0, count, rows):
            yield first, min(rows, count - first), 0, 0

    def read(self, stretch: Stretch, columns: Sequence[str]) -> Iterator[Row]:
        """Yield the rows of a stretch."""
        metadata = self.file.metadata
        last = stretch.first + stretch.rows
        begin = 0
        for group in range(metadata.num_row_groups):
            end = begin + metadata.row_group(group).num_rows
            if begin < last and end > stretch.first:
                table = self._read_group(group, columns)
                place = max(stretch.first - begin, 0)
                part = table.slice(place, min(last, end) - begin - place)
                values = [list_values(part.column(column)) for column in columns]
                for number, row in enumerate(zip(*values, strict=True), begin + place):
                    yield Row(number, row)
            begin = end

    def _read_group(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Return columns of a row group, which the next stretch may need too."""
        if self._group is None or self._group[:2] != (group, tuple(columns)):
            self._group = None  # before another one is read
            table = self.file.read_row_group(group, columns=list(columns))
            self._group = (group, tuple(columns), table)
        return self._group[2]


KINDS: dict[str, type[TableFile]] = {
    ".txt": TextFile,
    ".jsonl": JsonLinesFile,
    ".ndjson": JsonLinesFile,
    ".csv": CsvFile,
    ".parquet": ParquetFile,
}


def find_suffix(path: str) -> str:
    """Return the end of a path that tells the kind of the file."""
    return PurePosixPath(path).suffix.lower()


def open_table(storage: Storage, path: str) -> TableFile:
    """Return a file of rows."""
    return KINDS[find_suffix(path)](storage, path)


def iterate_lines(stream: IO[bytes], path: str) -> Iterator[bytes]:
    """Yield lines; refuse one that does not end."""
    reader = io.BufferedReader(cast("io.RawIOBase", stream), READ_BYTES)
    number = 0
    while line := reader.readline(RECORD_BYTES + 1):
        if len(line) > RECORD_BYTES:
            raise InputError(f"{path}: line {number} has over {RECORD_BYTES:,} bytes")
        yield line
        number += 1


def split_record(text: bytes) -> list[str]:
    """Return the fields of a record of CSV."""
    csv.field_size_limit(RECORD_BYTES)
    try:
        return next(csv.reader(io.StringIO(text.decode(errors="surrogateescape"), newline="")), [])
    except csv.Error as error:
        raise InputError(f"the record is not CSV: {error}") from error


def check_columns(path: str, there: Sequence[str], columns: Sequence[str]) -> None:
    """Refuse a file that lacks a column, or has two of that name."""
    for column in columns:
        if there.count(column) != 1:
            count = there.count(column) or "no"
            raise InputError(f"{path} has {count} column {column!r}; it has: {', '.join(there):.500}")
