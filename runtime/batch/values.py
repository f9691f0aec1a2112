"""Columns of tables as Python's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa


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
