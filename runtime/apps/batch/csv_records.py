"""Records of CSV, as Python's csv module reads them by default, with fields of any length.

The csv module limits the length of a field, and its limit is one for all code in the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def read_records(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the fields of each record; an empty line has none.

    Args:
        lines: with their ends, each of which is a line feed, a carriage return, or both. They are taken one
            by one: a record ends in the last one that was taken.
    """
    lines = iter(lines)
    for line in lines:
        if '"' in line:
            yield read_quoted_record(line, lines)
        else:
            text = line.rstrip("\r\n")
            yield text.split(",") if text else []


def read_quoted_record(line: str, lines: Iterator[str]) -> list[str]:
    """Return the fields of a record that begins with a line and may go on in the next ones."""
    fields = []
    position = 0
    while True:
        if line.startswith('"', position):
            field, line, position = read_quoted_field(line, position + 1, lines)
        else:
            field, position = read_plain_text(line, position)
        fields.append(field)
        if not line.startswith(",", position):
            return fields
        position += 1


def read_quoted_field(line: str, position: int, lines: Iterator[str]) -> tuple[str, str, int]:
    """Return a field from behind its first quote on, and the line and the position where it ends.

    Two quotes are one of the field. What comes behind the last quote belongs to the field too, and a field
    whose quote stays open has all that is left.
    """
    parts = []
    while True:
        quote = line.find('"', position)
        if quote < 0:
            parts.append(line[position:])
            line = next(lines, "")
            position = 0
            if not line:
                return "".join(parts), line, position
        elif line.startswith('""', quote):
            parts.append(line[position : quote + 1])
            position = quote + 2
        else:
            rest, end = read_plain_text(line, quote + 1)
            return "".join([*parts, line[position:quote], rest]), line, end


def read_plain_text(line: str, position: int) -> tuple[str, int]:
    """Return the text up to the next comma or the end of the line, and where it ends."""
    comma = line.find(",", position)
    if comma < 0:
        text = line[position:].rstrip("\r\n")
        return text, position + len(text)
    return line[position:comma], comma
