"""Reads manifest.json field by field, and checks each: the file may come from anywhere."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, TypeVar

from ..errors import IntegrityError, ManifestError

FILE_NAME = "manifest.json"

T = TypeVar("T")

_MISSING: Any = object()


def parse_json(text: str) -> Any:
    """Return a JSON text's value.

    Refuses what can be read and not written again: numbers that are infinite or NaN, and half a surrogate
    pair, which no file and no terminal takes.
    """
    value = json.loads(text, parse_float=parse_float, parse_int=parse_int, parse_constant=parse_float)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.20} is not a finite number")
    return number


def parse_int(text: str) -> int:
    parse_float(text)
    return int(text)


class Reader:
    """A JSON object of a file, read field by field, with errors that name the field."""

    def __init__(self, value: Any, what: str, file: str = FILE_NAME) -> None:
        if not isinstance(value, dict):
            raise ManifestError(f"{file}: {what} must be an object, not {value!r:.60}")
        self.value = value
        self.what = what
        self.file = file

    def get(self, name: str, kind: type[T], default: Any = _MISSING) -> T:
        value = self.value.get(name, default)
        if value is default and default is not _MISSING:
            return value  # type: ignore[no-any-return]
        return self.check_type(name, value, kind)

    def list_of(self, name: str, kind: type[T], default: Any = _MISSING) -> tuple[T, ...]:
        values = self.get(name, list, default)
        return tuple(self.check_type(f"{name}[{i}]", v, kind) for i, v in enumerate(values))

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.value.get(name, default)
        if not isinstance(value, bool):
            raise ManifestError(f"{self.file}: {self.what}.{name} must be true or false")
        return value

    def number(self, name: str, default: T) -> T | float:
        value = self.value.get(name, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ManifestError(f"{self.file}: {self.what}.{name} must be a number")
        return float(value)

    def texts(self, name: str) -> Mapping[str, str]:
        values = self.get(name, dict, {})
        return {key: self.check_type(f"{name}[{key!r}]", v, str) for key, v in values.items()}

    def check_type(self, name: str, value: Any, kind: type[T]) -> T:
        if not isinstance(value, kind) or isinstance(value, bool):
            got = "missing" if value is _MISSING else repr(value)[:60]
            raise ManifestError(f"{self.file}: {self.what}.{name} must be {kind.__name__}, but is {got}")
        return value


def check_word(word: str) -> str:
    """Return a word that names of files are made of; refuse one that could lead out of the bundle."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", word):
        raise IntegrityError(f"{FILE_NAME} names {word!r}, which is not of letters, digits, _ and - alone")
    return word


def check_file_name(name: str) -> str:
    """Return a name that is a relative POSIX path inside the bundle's folder; refuse any other."""
    path = PurePosixPath(name)
    leaves = path.is_absolute() or ".." in path.parts or not path.parts
    if leaves or any(sign in name for sign in "\\:\0"):
        raise IntegrityError(f"{FILE_NAME} names {name!r}, which is not a path inside the bundle")
    if not name.isprintable():
        raise IntegrityError(f"{FILE_NAME} names {name!r}, which has non-printable characters")
    return str(path)
