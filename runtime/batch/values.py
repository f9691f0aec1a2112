"""Columns of tables as Python's values."""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa


def list_values(column: Any) -> list[Any]:
    """Return a column's values as Python's own; texts of Arrow's as bytes, which need not be UTF-8."""
    if isinstance(column, pa.Array | pa.ChunkedArray):
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column = column.cast(pa.large_binary())
        return cast("list[Any]", column.to_pylist())
    return cast("list[Any]", column.tolist()) if hasattr(column, "tolist") else list(column)
