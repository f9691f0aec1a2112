"""Reads the text and JSON files of a tokenizer, and names those that are damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....runtime.bundle.json_reader import parse_json
from ....runtime.errors import TokenizerError
from ....runtime.text.tokenizer import WAY_OUT, join_lines, read


def read_text(path: Path) -> str:
    """Return a file's text, which must be UTF-8."""
    try:
        return read(path).decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8: {error.reason}; {WAY_OUT}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = parse_json(read(path).decode())
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {join_lines(error)}; {WAY_OUT}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object; {WAY_OUT}")
    return value
