"""A table that cuts no word: where its columns do not fit side by side, each row becomes several lines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...errors import make_printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult


SHORT = 24  # letters of a text that is kept on one line before longer texts get more than they need
LEGIBLE = 16  # columns that a longer text needs, lest each line hold a word


class FittingTable(Table):
    """A plain table of texts, as wide as what it is printed to.

    Columns get the width of their longest word at least, long texts `LEGIBLE`. Where those alone are too
    wide, as in a terminal of 80 columns, they move together by a space; where that is not enough, each row
    becomes lines of heading and text, with an empty line between two rows. The texts of the columns that are
    `numbers` end at the right.
    """

    def __init__(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str] = ()
    ) -> None:
        super().__init__(show_header=any(columns), box=None, pad_edge=False)
        self._title = make_printable(title)
        self._headings = list(columns)
        self._texts = [list(map(make_printable, row)) for row in rows]
        for column in columns:
            justify: JustifyMethod = "right" if column in numbers else "left"
            self.add_column(column, overflow="fold", justify=justify, vertical="bottom" if numbers else "top")
        for row in self._texts:
            self.add_row(*map(Text, row))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._title:
            yield Text(self._title, style="bold")
        gaps = len(self._headings) - 1
        wide = [self._measure(index, whole=True) for index in range(len(self._headings))]
        words = [self._measure(index, whole=False) for index in range(len(self._headings))]
        narrow = [
            max(word, LEGIBLE) if text > SHORT else word for word, text in zip(words, wide, strict=True)
        ]
        if sum(narrow) + 2 * gaps > options.max_width:
            self.padding = (0, 1, 0, 0)
        room = options.max_width - (self.padding[1] + self.padding[3]) * gaps
        if sum(wide) > room and sum(narrow) > room and len(self._headings) > 2:
            yield from self._draw_records(console, options)
            return
        if sum(wide) > room:
            for column, width in zip(self.columns, share_widths(narrow, wide, room), strict=True):
                column.width = width
        yield from super().__rich_console__(console, options)

    def _measure(self, index: int, whole: bool) -> int:
        """Return the width of a column's longest line, or of its longest word."""
        texts = [self._headings[index], *(row[index] for row in self._texts)]
        parts = (part for text in texts for part in (text.split("\n") if whole else text.split()))
        return max(map(cell_len, parts), default=0)

    def _draw_records(self, console: Console, options: ConsoleOptions) -> RenderResult:
        margin = max(map(cell_len, self._headings)) + 2
        for number, row in enumerate(self._texts):
            if number:
                yield Text("")
            for heading, text in zip(self._headings, row, strict=True):
                if text:
                    lines = Text(text).wrap(console, max(options.max_width - margin, 10), overflow="fold")
                    first, *others = list(lines) or [Text("")]
                    yield Text(heading.ljust(margin)) + first
                    for line in others:
                        yield Padding(line, (0, 0, 0, margin), expand=False)


def share_widths(narrow: Sequence[int], wide: Sequence[int], room: int) -> list[int]:
    """Return the widths of columns that do not all have the room they want.

    `narrow` is what each needs at least, `wide` what each would like; where even `narrow` is too much, the
    widest get less. What is left goes to the texts of most lines.
    """
    widths = list(narrow)
    while sum(widths) > room and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    for index in sorted(range(len(wide)), key=lambda index: wide[index]):
        if wide[index] <= SHORT and sum(widths) - widths[index] + wide[index] <= room:
            widths[index] = wide[index]
    while sum(widths) < room and any(have < want for have, want in zip(widths, wide, strict=True)):
        lines = [want / max(have, 1) for have, want in zip(widths, wide, strict=True)]
        widths[lines.index(max(lines))] += 1
    return widths


def format_size(count: float) -> str:
    """Return a number of bytes as text, such as "1.5 MB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
