"""Columns of tables as Python's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa

from ...errors import InputError

PANDAS_MISSING = ("NAType", "NaTType")


@dataclass(frozen=True)
class Unreadable:
    """A value that Python cannot have, and why."""

    reason: str


def list_values(column: Any) -> list[Any]:
    """Return a column's values as Python's own; texts of Arrow's as bytes, which need not be UTF-8."""
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        return cast("list[Any]", column.tolist()) if hasattr(column, "tolist") else list(column)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    try:
        return cast("list[Any]", column.to_pylist())
    except (ValueError, OverflowError):  # what is no UTF-8 among messages; a time beyond the year 9999
        return [read_value(value) for value in column]


def read_value(value: pa.Scalar) -> Any:
    """Return a value of Arrow's as Python's own."""
    try:
        return value.as_py()
    except (ValueError, OverflowError) as error:
        return Unreadable(str(error))


def read_text(name: str, value: Any, longest: int) -> str:
    """Return a value as text; refuse what is none, and what has more bytes than `longest`."""
    if isinstance(value, str | bytes):
        check_size(name, len(value), longest)
        try:
            data = value.encode() if isinstance(value, str) else value
            text = data.decode()
        except UnicodeEncodeError as error:
            raise InputError(f"{name} has a lone surrogate at character {error.start + 1}") from error
        except UnicodeDecodeError as error:
            byte = f"byte {error.start + 1} is 0x{data[error.start]:02x}"
            raise InputError(f"{name} is not UTF-8: {byte}") from error
        check_size(name, len(data), longest)
        return text
    if value is None or is_missing(value):
        raise InputError(f"{name} is missing")
    if isinstance(value, Unreadable):
        raise InputError(f"{name} cannot be read: {value.reason}")
    raise InputError(f"{name} must be a text, not {type(value).__name__}{describe(value)}")


def check_size(name: str, size: int, longest: int) -> None:
    """Refuse a text of too many bytes."""
    if size > longest:
        raise InputError(f"{name} has {size:,} bytes; at most {longest:,} are allowed; split it")


def is_missing(value: Any) -> bool:
    """Return whether a value is what numpy or pandas has for a missing one."""
    return (isinstance(value, float | np.floating) and value != value) or type(
        value
    ).__name__ in PANDAS_MISSING


def describe(value: Any) -> str:
    """Return a number as text, to be told; nothing of others, and of very long ones."""
    is_short = isinstance(value, bool | float | np.number) or (isinstance(value, int) and abs(value) < 10**20)
    return f" {value}" if is_short else ""
