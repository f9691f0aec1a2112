"""Escapes text for display, and writes files whole or not at all."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import OutputError

# Control characters, which also steer a terminal; halves of surrogate pairs, which no file can hold; marks
# that turn the reading direction of what follows; and the two code points that XML has no place for.
UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)


def make_printable(text: str) -> str:
    r"""Return the text with escapes for what cannot be shown, such as \x1b."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written later."""
    try:
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} cannot be written: it is not a file")
        temporary = choose_temporary_path(path)
        temporary.touch()
        temporary.unlink()
    except (OSError, ValueError, RuntimeError) as error:
        raise OutputError(f"{path} cannot be written: {explain_error(error)}") from error


def write_whole(path: Path, text: str) -> None:
    """Write UTF-8 text to a temporary file in the same folder, and rename it to `path`."""
    temporary = choose_temporary_path(path)
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path.resolve())
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"{path} cannot be written: {explain_error(error)}") from error


def choose_temporary_path(path: Path) -> Path:
    """Return a temporary name in the same folder, or in that of the link's target if `path` is a link."""
    path = path.resolve()
    return path.with_name(f".{path.name}.partial-{os.getpid()}")


def explain_error(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
