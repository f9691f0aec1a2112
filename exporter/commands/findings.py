"""What `planforge inspect` finds, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ...runtime.apps.commands.tables import FittingTable, format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

Section: TypeAlias = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, columns, rows


@dataclass(frozen=True)
class Inspection:
    """The findings of an inspection, as JSON and as tables."""

    value: Mapping[str, Any]  # what --json prints
    sections: Sequence[Section]
    notes: Sequence[str] = ()  # lines below the tables

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return dict(self.value)

    def tables(self) -> list[RenderableType]:
        """Return the tables for a terminal."""
        return [FittingTable(*section) for section in self.sections]


class Sized(Protocol):
    """An entry that lists a file's size."""

    @property
    def bytes(self) -> int: ...


def make_file_section(folder: Path, files: Mapping[str, Sized]) -> Section:
    """Return the table of the files that a folder lists."""
    rows = [
        (name, format_size(entry.bytes), describe_file(folder / name, entry.bytes))
        for name, entry in sorted(files.items())
    ]
    return "files", ("file", "size", "state"), rows


def describe_file(path: Path, size: int) -> str:
    """Return a file's state as far as it shows without hashing; `planforge verify` hashes."""
    if not path.is_file():
        return "MISSING"
    found = path.stat().st_size
    return "there, not hashed" if found == size else f"CHANGED: has {format_size(found)}"
