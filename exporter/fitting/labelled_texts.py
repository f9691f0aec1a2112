"""Tables of labelled texts, in the formats of `planforge batch`; errors name the line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...runtime.apps.batch.formats import (
    KINDS,
    RECORD_BYTES,
    Record,
    TsvFile,
    find_suffix,
    open_table,
)
from ...runtime.apps.batch.storage import Storage
from ...runtime.apps.batch.table_file import Row, RowRange, TableFile
from ...runtime.apps.batch.values import read_text
from ...runtime.errors import DataError, InputError

HEADER = ("text", "label")
STRETCH_ROWS = 10_000


@dataclass(frozen=True)
class Table:
    """Texts with their labels, and the place of each in its file.

    Attributes:
        lines: of a file of lines the line, of another one the row; both from 1.
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    lines: tuple[int, ...]


class NamelessTsvFile(TsvFile):
    """A .tsv file with lines of text TAB label, whose first line does not name columns."""

    FIRST = 0

    @cached_property
    def header(self) -> list[str]:
        """Return the columns that each line has."""
        return list(HEADER)

    def is_row(self, record: Record) -> bool:
        """Return True, as each line is a row."""
        return True


def read_table(path: Path) -> Table:
    """Read the columns "text" and "label" of a file in one of the formats of `planforge batch`.

    The first line of a .tsv names the columns, in any order: "text", "label" and maybe others. Without
    such a line a row has two columns: text TAB label. A label may be a whole number.

    Raises:
        InputError: the file is of another kind, cannot be read, or lacks a column.
        DataError: a row lacks a text or a label, or there is only one label; the row is named.
    """
    if find_suffix(str(path)) not in KINDS:
        raise InputError(f"the table {path} is not one of the supported kinds: {', '.join(KINDS)}")
    texts: list[str] = []
    labels: list[str] = []
    lines: list[int] = []
    try:
        table = open_labelled(Storage.of(path.parent), path)
        for place in table.cut(STRETCH_ROWS):
            for row in table.read(RowRange(path.name, *place), HEADER):
                line = table.count_to(row.number)
                text, label = read_row(row, f"{path}, {table.UNIT} {line}")
                texts.append(text)
                labels.append(label)
                lines.append(line)
    except OSError as error:
        raise InputError(f"the table {path} cannot be read: {error}") from error
    if len(set(labels)) < 2:
        found = f"only the label {labels[0]!r}" if labels else "no rows"
        raise DataError(f"{path} has {found}; a classifier needs two classes or more")
    return Table(tuple(texts), tuple(labels), tuple(lines))


def open_labelled(storage: Storage, path: Path) -> TableFile:
    """Return a file that has the columns."""
    table = open_table(storage, str(path))
    if isinstance(table, TsvFile) and not set(HEADER) <= set(table.header):
        table = NamelessTsvFile(storage, str(path))
    table.check(HEADER)
    return table


def read_row(row: Row, place: str) -> tuple[str, str]:
    """Return the text and the label of a row; refuse a row that lacks one of them."""
    if row.error is not None:
        raise DataError(f"{place}: {row.error}")
    text, label = (read_cell(name, value, place) for name, value in zip(HEADER, row.values, strict=True))
    return text, label.strip()


def read_cell(name: str, value: Any, place: str) -> str:
    """Return a value as text; refuse one that is empty."""
    if name == "label" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    try:
        text = read_text(name, value, RECORD_BYTES)
    except InputError as error:
        raise DataError(f"{place}: {error}") from error
    if not text.strip():
        raise DataError(f"{place} has an empty {name}")
    return text
