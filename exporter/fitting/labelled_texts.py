"""Tables of labelled texts that a classifier is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...runtime.apps.batch.text_table import read_text_table
from ...runtime.errors import DataError


@dataclass(frozen=True)
class Table:
    """Texts with their labels, and the place of each in its file.

    Attributes:
        lines: of a file of lines the line, of another one the row; both from 1.
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    lines: tuple[int, ...]


def read_table(path: Path) -> Table:
    """Read the columns "text" and "label", as `read_text_table` does.

    Raises:
        InputError: the file is of another kind, cannot be read, or lacks a column.
        DataError: a row lacks a text or a label, or there is only one label; the row is named.
    """
    table = read_text_table(path, ("text", "label"))
    labels = table.columns["label"]
    if (*table.columns["text"][:1], *labels[:1]) == ("text", "labels"):
        raise DataError(
            f"{path} begins with the columns text and labels, which are those of words: add --per-token"
            " (per_token=True), or name the second one label"
        )
    if len(set(labels)) < 2:
        found = f"only the label {labels[0]!r}" if labels else "no rows"
        raise DataError(f"{path} has {found}; a classifier needs two classes or more")
    return Table(table.columns["text"], labels, table.lines)
