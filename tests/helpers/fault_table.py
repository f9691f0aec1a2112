"""Tables of planted faults, which tests write into build/ for the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .paths import ROOT

Row = tuple[str, ...]


def write_table(name: str, head: Row, rows: Sequence[Row], last: str = "") -> None:
    """Write build/NAME.md: the rows in order, and a last line."""
    lines = [" | ".join(map(escape, row)) for row in (head, ("---",) * len(head), *sorted(rows))]
    text = "\n".join(f"| {line} |" for line in lines)
    path = ROOT / "build" / f"{name}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{text}\n\n{last}\n" if last else f"{text}\n", encoding="utf-8")


def escape(cell: str) -> str:
    """Return a text as Markdown shows it in a table: a special token is no tag and no border."""
    return cell.replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")


@contextmanager
def collect_table(name: str, head: Row) -> Iterator[list[Row]]:
    """Give a list of rows, and write the table when the tests that fill it are through."""
    rows: list[Row] = []
    yield rows
    write_table(name, head, rows)
