"""Parquet as a file of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import InputError
from .storage import Storage
from .table_file import Row, RowRange, check_columns
from .values import list_values


class ParquetFile:
    """Parquet: row groups are read one at a time, and of them the columns that are asked for."""

    UNIT: ClassVar[str] = "row"

    def __init__(self, storage: Storage, path: str) -> None:
        self.storage = storage
        self.path = path
        self._group: tuple[int, tuple[str, ...], pa.Table] | None = None  # that was read last

    @cached_property
    def file(self) -> pq.ParquetFile:
        """The open file."""
        try:
            return pq.ParquetFile(self.path, filesystem=self.storage.files)
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{self.path} is not a readable Parquet file: {error}") from error

    def check(self, columns: Sequence[str]) -> None:
        """Refuse a file that lacks one of the columns, or is no Parquet."""
        check_columns(self.path, self.file.schema_arrow.names, columns)

    def cut(self, rows: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield ranges of rows."""
        count = self.file.metadata.num_rows
        for first in range(0, count, rows):
            yield first, min(rows, count - first), 0, 0

    def read(self, row_range: RowRange, columns: Sequence[str]) -> Iterator[Row]:
        """Yield the rows of a row range."""
        metadata = self.file.metadata
        last = row_range.first + row_range.rows
        begin = 0
        for group in range(metadata.num_row_groups):
            end = begin + metadata.row_group(group).num_rows
            if begin < last and end > row_range.first:
                table = self._read_group(group, columns)
                place = max(row_range.first - begin, 0)
                part = table.slice(place, min(last, end) - begin - place)
                values = [list_values(part.column(column)) for column in columns]
                for number, row in enumerate(zip(*values, strict=True), begin + place):
                    yield Row(number, row)
            begin = end

    def count_to(self, number: int) -> int:
        """Return which row it is, from 1."""
        return number + 1

    def _read_group(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Return columns of a row group, which the next row range may need too."""
        if self._group is None or self._group[:2] != (group, tuple(columns)):
            self._group = None  # before another one is read
            table = self.file.read_row_group(group, columns=list(columns))
            self._group = (group, tuple(columns), table)
        return self._group[2]
