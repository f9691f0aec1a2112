"""What a job asks of a file of rows, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from ...errors import InputError
from .storage import Storage


class RowRange(NamedTuple):
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


class Row(NamedTuple):
    """A row: the values of the columns that were asked for, or why it has none."""

    number: int
    values: tuple[Any, ...]
    error: str | None = None


class TableFile(Protocol):
    """A file of rows; it keeps what the next row range may need."""

    UNIT: ClassVar[str]  # what a row is to a person who looks for it

    def __init__(self, storage: Storage, path: str) -> None: ...

    def check(self, columns: Sequence[str]) -> None:
        """Refuse a file that lacks one of the columns."""

    def cut(self, rows: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield first, rows, offset and size of row ranges of at most so many rows."""

    def read(self, row_range: RowRange, columns: Sequence[str]) -> Iterator[Row]:
        """Yield the rows of a row range."""

    def count_to(self, number: int) -> int:
        """Return a row's place among the file's units, from 1."""


def check_columns(path: str, there: Sequence[str], columns: Sequence[str]) -> None:
    """Refuse a file that lacks a column, or has two of that name."""
    for column in columns:
        if there.count(column) != 1:
            count = there.count(column) or "no"
            raise InputError(f"{path} has {count} columns {column!r}; it has: {', '.join(there):.500}")
