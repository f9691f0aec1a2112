"""The kinds of files that a job reads, each cut into ranges of rows that can be read by themselves.

A row's number is its place in the file: of a text or of JSON lines its line, from 0.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import PurePosixPath
from typing import IO, Any, ClassVar, NamedTuple, TypeVar, cast

from ...errors import InputError
from ..encoding import LONGEST_MARK, remove_mark
from .csv_records import read_records
from .parquet_file import ParquetFile
from .storage import Storage
from .table_file import Row, RowRange, TableFile, check_columns

READ_BYTES = 2**20  # at a time
ROW_RANGE_BYTES = 64 * 2**20  # after which a row range ends, however few rows it has
RECORD_BYTES = 16 * 2**20  # of a line, or of a record of CSV that goes over several

Field = TypeVar("Field", str, bytes)


class Record(NamedTuple):
    """A line, or a record of CSV: its number, its bytes from begin to end in the stream, and what it has.

    That is the line's bytes, the fields, or why it cannot be read.
    """

    number: int
    begin: int
    end: int
    content: bytes | list[str] | InputError


class LineFile:
    """A file of lines; blank ones are no rows."""

    UNIT: ClassVar[str] = "line"
    FIRST: ClassVar[int] = 0  # the number of the file's first record

    def __init__(self, storage: Storage, path: str) -> None:
        self.storage = storage
        self.path = path

    def check(self, columns: Sequence[str]) -> None:
        """Refuse another encoding than UTF-8, which a mark tells; lines are looked at when they are read."""
        with self.storage.files.open_input_stream(self.path, compression=None) as stream:
            remove_mark(stream.read(LONGEST_MARK), self.path)

    def cut(self, rows: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield row ranges of whole records, of `ROW_RANGE_BYTES` or little more."""
        first = count = begin = end = 0
        with self.storage.files.open_input_stream(self.path, compression=None) as stream:
            for record in self.iterate_records(stream, self.FIRST):
                if not self.is_row(record):
                    continue
                if count == rows or (count and record.end - begin > ROW_RANGE_BYTES):
                    yield first, count, begin, end - begin
                    count = 0
                if count == 0:
                    first = record.number
                    begin = record.begin
                count += 1
                end = record.end
        if count:
            yield first, count, begin, end - begin

    def read(self, row_range: RowRange, columns: Sequence[str]) -> Iterator[Row]:
        """Yield the rows of a row range."""
        with self.storage.files.open_input_file(self.path) as stream:
            stream.seek(row_range.offset)
            for record in islice(self.iterate_records(stream, row_range.first), row_range.rows):
                try:
                    yield Row(record.number, self.parse(record, columns))
                except InputError as error:
                    yield Row(record.number, (), str(error))

    def iterate_records(self, stream: IO[bytes], first: int) -> Iterator[Record]:
        """Yield the lines that are not blank."""
        begin = 0
        for number, (line, size) in enumerate(self.iterate_lines(stream, first), first):
            if size > RECORD_BYTES:
                error = InputError(f"the line has {size:,} bytes; at most {RECORD_BYTES:,} are allowed")
                yield Record(number, begin, begin + size, error)
            elif line.strip():
                yield Record(number, begin, begin + size, line.rstrip(b"\r\n"))
            begin += size

    def iterate_lines(self, stream: IO[bytes], first: int) -> Iterator[tuple[bytes, int]]:
        """Yield lines and their sizes; of one that is larger than may be read only the beginning.

        The file's first line is without a mark of UTF-8, which counts in its size.
        """
        reader = io.BufferedReader(cast("io.RawIOBase", stream), READ_BYTES)
        is_first = first == self.FIRST
        while line := reader.readline(RECORD_BYTES + 1):
            size = len(line)
            while size > RECORD_BYTES and not line.endswith(b"\n") and (more := reader.readline(READ_BYTES)):
                size += len(more)
                if more.endswith(b"\n"):
                    break
            yield remove_mark(line, self.path) if is_first else line, size
            is_first = False

    def is_row(self, record: Record) -> bool:
        """Return whether a record is none that names the columns."""
        return record.number >= 0

    def count_to(self, number: int) -> int:
        """Return which line a row is, from 1."""
        return number - self.FIRST + 1

    def parse(self, record: Record, columns: Sequence[str]) -> tuple[Any, ...]:
        """Return the values of a record."""
        if isinstance(record.content, InputError):
            raise record.content
        assert isinstance(record.content, bytes)
        return self.parse_line(record.content, columns)

    def parse_line(self, text: bytes, columns: Sequence[str]) -> tuple[Any, ...]:
        """Return the values of a line."""
        raise NotImplementedError


class TextFile(LineFile):
    """Text: a line is a row, and its only column "text"."""

    def check(self, columns: Sequence[str]) -> None:
        """Refuse more than one column, and another encoding than UTF-8."""
        if len(columns) > 1:
            raise InputError(
                f"{self.path}: a text file has a single column, not {', '.join(columns)};"
                " use .jsonl, .csv or .tsv"
            )
        super().check(columns)

    def parse_line(self, text: bytes, columns: Sequence[str]) -> tuple[Any, ...]:
        """Return the line."""
        return (text,)


class JsonLinesFile(LineFile):
    """JSON lines: an object for each row."""

    def parse_line(self, text: bytes, columns: Sequence[str]) -> tuple[Any, ...]:
        """Return the values of the object's keys; None of one that it lacks."""
        try:
            value = json.loads(text.decode())
        except UnicodeDecodeError as error:
            byte = f"byte {error.start + 1} is 0x{text[error.start]:02x}"
            raise InputError(f"the line is not UTF-8: {byte}") from error
        except (ValueError, RecursionError) as error:  # the latter: nested thousands deep
            raise InputError(f"the line is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise InputError(f"the line is not a JSON object: {text.decode():.80}")
        return tuple(map(value.get, columns))


class TsvFile(LineFile):
    """Fields with a TAB between them, of which none is quoted: the first line names the columns."""

    FIRST = -1

    @cached_property
    def first(self) -> Record:
        """The first line that is not blank."""
        with self.storage.files.open_input_stream(self.path, compression=None) as stream:
            first = next(self.iterate_records(stream, self.FIRST), None)
        if first is None:
            raise InputError(f"{self.path} is empty; its first line must name the columns")
        return first

    @cached_property
    def header(self) -> list[str]:
        """The names in the first line."""
        if isinstance(self.first.content, InputError):
            raise self.first.content
        assert isinstance(self.first.content, bytes)
        return [field.decode(errors="replace") for field in self.first.content.split(b"\t")]

    def is_row(self, record: Record) -> bool:
        """Return whether a line is behind the first one."""
        return record.number > self.first.number

    def check(self, columns: Sequence[str]) -> None:
        """Refuse a file whose first line lacks one of the columns."""
        super().check(columns)
        check_columns(self.path, self.header, columns)

    def parse_line(self, text: bytes, columns: Sequence[str]) -> tuple[Any, ...]:
        """Return the fields of the columns as bytes, which need not be UTF-8."""
        return pick_fields(text.split(b"\t"), self.header, columns)


class CsvFile(LineFile):
    """CSV, as Python's csv module reads it: the first record names the columns."""

    UNIT: ClassVar[str] = "row"
    FIRST = -1

    @cached_property
    def header(self) -> list[str]:
        """The names in the first record."""
        with self.storage.files.open_input_stream(self.path, compression=None) as stream:
            first = next(self.iterate_records(stream, self.FIRST), None)
        if first is None:
            raise InputError(f"{self.path} is empty; its first line must name the columns")
        return self.take_fields(first)

    def check(self, columns: Sequence[str]) -> None:
        """Refuse a file whose first record lacks one of the columns."""
        super().check(columns)
        check_columns(self.path, self.header, columns)

    def iterate_records(self, stream: IO[bytes], first: int) -> Iterator[Record]:
        """Yield the records that are not blank; a quoted field may go over several lines."""
        end = begin = 0
        number = first

        def read_lines() -> Iterator[str]:
            nonlocal end
            for line, size in self.iterate_lines(stream, first):
                if end + size - begin > RECORD_BYTES:
                    raise InputError(
                        f"{self.path}: record {number} has over {RECORD_BYTES:,} bytes; is a closing quote"
                        " missing?"
                    )
                end += size - len(line)  # a mark of UTF-8
                for piece in line.splitlines(keepends=True):  # a lone CR ends a line too
                    end += len(piece)
                    yield piece.decode(errors="surrogateescape")

        for fields in read_records(read_lines()):
            if fields:
                yield Record(number, begin, end, fields)
                number += 1
            begin = end

    def parse(self, record: Record, columns: Sequence[str]) -> tuple[Any, ...]:
        """Return the record's fields as bytes, which need not be UTF-8."""
        fields = pick_fields(self.take_fields(record), self.header, columns)
        return tuple(field.encode(errors="surrogateescape") for field in fields)

    def count_to(self, number: int) -> int:
        """Return which record a row is, from 1 behind the first one."""
        return number + 1

    def take_fields(self, record: Record) -> list[str]:
        """Return a record's fields; raise why it has none."""
        if isinstance(record.content, InputError):
            raise record.content
        assert isinstance(record.content, list)
        return record.content


KINDS: dict[str, type[TableFile]] = {
    ".txt": TextFile,
    ".jsonl": JsonLinesFile,
    ".ndjson": JsonLinesFile,
    ".csv": CsvFile,
    ".tsv": TsvFile,
    ".parquet": ParquetFile,
}


def find_suffix(path: str) -> str:
    """Return the end of a path that tells the kind of the file."""
    return PurePosixPath(path).suffix.lower()


def open_table(storage: Storage, path: str) -> TableFile:
    """Return a file of rows."""
    return KINDS[find_suffix(path)](storage, path)


def pick_fields(fields: Sequence[Field], header: Sequence[str], columns: Sequence[str]) -> tuple[Field, ...]:
    """Return the fields of columns; refuse a record that has more fields than the header, or fewer."""
    if len(fields) != len(header):
        raise InputError(f"the record has {len(fields)} fields, the file's columns are {len(header)}")
    return tuple(fields[header.index(column)] for column in columns)
