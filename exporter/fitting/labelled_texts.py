"""Tables of labelled texts; errors name the line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...runtime.errors import DataError, InputError

HEADER = ("text", "label")


@dataclass(frozen=True)
class Table:
    """Texts, the label of each, and the line of the file that it stands in."""

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    lines: tuple[int, ...]


def read_table(path: Path) -> Table:
    """Read rows of text TAB label from a UTF-8 file.

    A first line that names the columns, "text" and "label" in any order and beside others, says which are
    meant. Without one a row has two columns. Empty lines are passed over; nothing is quoted.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: a text may hold a \u2028
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the table {path} cannot be read: {error}") from error
    rows = [(n, line.rstrip("\r").split("\t")) for n, line in enumerate(lines, 1) if line.strip()]
    names = list(HEADER)
    if rows and set(HEADER) <= set(rows[0][1]):
        names = rows.pop(0)[1]
    for number, cells in rows:
        if len(cells) != len(names):
            raise DataError(
                f"{path}, line {number} has {len(cells)} columns, {len(names)} are needed: text TAB label"
            )
        for name in HEADER:
            if not cells[names.index(name)].strip():
                raise DataError(f"{path}, line {number} has an empty {name}")
    labels = tuple(cells[names.index("label")].strip() for _, cells in rows)
    if len(set(labels)) < 2:
        found = f"only the label {labels[0]!r}" if labels else "no rows"
        raise DataError(f"{path} has {found}; a classifier needs two classes or more")
    texts = tuple(cells[names.index("text")] for _, cells in rows)
    return Table(texts, labels, tuple(number for number, _ in rows))
