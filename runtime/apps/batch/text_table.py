"""Tables whose columns are texts, such as labelled ones, read whole; errors name the line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import DataError, InputError
from .formats import KINDS, RECORD_BYTES, Record, TsvFile, find_suffix, open_table
from .storage import Storage
from .table_file import Row, RowRange, TableFile
from .values import read_text

STRETCH_ROWS = 10_000
NUMBERED = ("label", "pytorch")  # columns whose texts may be whole numbers


@dataclass(frozen=True)
class TextTable:
    """Columns of texts, and the place of each row in its file.

    Attributes:
        columns: the texts of each column that was found, by its name.
        lines: of a file of lines the line, of another one the row; both from 1.
        unit: what a row is to a person who looks for it: "line" or "row".
    """

    path: Path
    columns: dict[str, tuple[str, ...]]
    lines: tuple[int, ...]
    unit: str

    def find_place(self, row: int) -> str:
        """Return where a row is, in words."""
        return f"{self.path}, {self.unit} {self.lines[row]}"


class NamelessTsvFile(TsvFile):
    """A .tsv file whose first line does not name the columns: they are given."""

    FIRST = 0
    given: Sequence[str] = ()

    @cached_property
    def header(self) -> list[str]:
        """Return the columns that each line has."""
        return list(self.given)

    def is_row(self, record: Record) -> bool:
        """Return True, as each line is a row."""
        return True


def read_text_table(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> TextTable:
    """Read columns of texts from a file in one of the formats of `planforge batch`.

    The first line of a .tsv names the columns, in any order, those that are needed and maybe others. Without
    such a line a row has the needed columns, with a TAB between two. A label may be a whole number.

    Args:
        path: the file.
        needed: columns that it must have.
        optional: columns that are read if it has them.

    Raises:
        InputError: the file is of another kind, cannot be read, or lacks a column.
        DataError: a row lacks a text, or has an empty one; the row is named.
    """
    if find_suffix(str(path)) not in KINDS:
        raise InputError(f"the table {path} is not one of the supported kinds: {', '.join(KINDS)}")
    try:
        table = open_columns(Storage.of(path.parent), path, needed)
        names = [*needed, *(name for name in optional if has_columns(table, [*needed, name]))]
        rows = [
            row for place in table.cut(STRETCH_ROWS) for row in table.read(RowRange(path.name, *place), names)
        ]
    except OSError as error:
        raise InputError(f"the table {path} cannot be read: {error}") from error
    found = [
        index
        for index, name in enumerate(names)
        if name in needed or any(row.values[index] is not None for row in rows if row.error is None)
    ]
    texts = [
        read_row(row, names, found, f"{path}, {table.UNIT} {table.count_to(row.number)}") for row in rows
    ]
    columns = list(zip(*texts, strict=True)) or [()] * len(found)
    lines = tuple(table.count_to(row.number) for row in rows)
    return TextTable(
        path, {names[i]: column for i, column in zip(found, columns, strict=True)}, lines, table.UNIT
    )


def open_columns(storage: Storage, path: Path, needed: Sequence[str]) -> TableFile:
    """Return a file that has the columns."""
    table = open_table(storage, str(path))
    if isinstance(table, TsvFile) and not set(needed) <= set(table.header):
        table = NamelessTsvFile(storage, str(path))
        table.given = needed
    table.check(needed)
    return table


def has_columns(table: TableFile, names: Sequence[str]) -> bool:
    """Tell whether a file has columns; one of JSON lines may."""
    try:
        table.check(names)
    except InputError:
        return False
    return True


def read_row(row: Row, names: Sequence[str], found: Sequence[int], place: str) -> tuple[str, ...]:
    """Return the texts of a row's columns that were found; refuse a row that lacks one of them."""
    if row.error is not None:
        raise DataError(f"{place}: {row.error}")
    return tuple(read_cell(names[index], row.values[index], place) for index in found)


def read_cell(name: str, value: Any, place: str) -> str:
    """Return a value as text, that of a label without spaces around it; refuse one that is empty."""
    if name in NUMBERED and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    try:
        text = read_text(name, value, RECORD_BYTES)
    except InputError as error:
        raise DataError(f"{place}: {error}") from error
    if not text.strip():
        raise DataError(f"{place} has an empty {name}")
    return text.strip() if name in NUMBERED else text
