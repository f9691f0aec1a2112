"""What a worker does with a part: reads its rows, has them answered, and writes one file."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...bundle.bundle import Bundle
from ...errors import BatchError, PlanForgeError
from .plan import Part, Source
from .result import PartResult
from .storage import Storage
from .table_file import Row, TableFile
from .tasks import ERROR, TOKENS
from .worker import BatchWorker

log = logging.getLogger("planforge")

COUNTS = b"planforge"  # the key of a part's metadata with its counts


@dataclass(frozen=True)
class JobSpec:
    """What the parts of a job have in common; it can be pickled.

    Attributes:
        bundle_hash: of the manifest; a worker whose bundle has another one is refused.
        columns: the input's columns by the task's.
        id_column: has the rows' ids; without it they are made of file and row.
        source: where the rows come from.
        output: the folder of the answers.
    """

    bundle: str
    bundle_hash: str
    task: str
    columns: Mapping[str, str]
    source: Source
    output: Storage
    id_column: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    load_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def all_columns(self) -> list[str]:
        """The columns that are read: the task's, and the ids'."""
        return [*self.columns.values(), *([self.id_column] if self.id_column else [])]

    def describe(self) -> dict[str, Any]:
        """Return what its answers depend on, as JSON has it: a job goes on only with the same."""
        job = {
            "bundle_hash": self.bundle_hash,
            "task": self.task,
            "columns": self.columns,
            "id_column": self.id_column,
            "options": self.options,
            "load_options": {name: value for name, value in self.load_options.items() if name != "threads"},
            "input": self.source.storage.path,  # an address may have a password in it
        }
        return dict(json.loads(json.dumps(job, default=str)))


@dataclass(frozen=True)
class Failure:
    """Why a worker cannot go on, which another one could not either."""

    message: str


class PartRunner:
    """A worker's model, and what it computes with it."""

    def __init__(self, spec: JobSpec) -> None:
        if hash_bundle(spec.bundle) != spec.bundle_hash:
            raise BatchError(
                f"on {name_worker()}, {spec.bundle} is not the bundle that the job began with; put the same"
                " bundle there"
            )
        self.spec = spec
        self._table: tuple[str, TableFile] | None = None
        self.worker = BatchWorker(
            spec.bundle,
            spec.task,
            columns=spec.columns,
            options=spec.options,
            load_options=spec.load_options,  # type: ignore[arg-type]  # checked by load()
        )

    def run(self, part: Part) -> PartResult:
        """Compute a part and write it."""
        began = time.perf_counter()
        table = self.compute(part)
        errors = len(table) - table.column(ERROR).null_count
        tokens = pc.sum(table.column(TOKENS)).as_py() or 0
        counts = json.dumps({"rows": len(table), "errors": errors, "tokens": tokens}).encode()
        buffer = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata({COUNTS: counts}), buffer)
        self.spec.output.write(part.file, buffer.getvalue())
        seconds = time.perf_counter() - began
        example = next(filter(None, table.column(ERROR).to_pylist()), None)
        return PartResult(part.number, len(table), errors, tokens, seconds, name_worker(), example)

    def compute(self, part: Part) -> pa.Table:
        """Return a part's rows: id, file, row, and what `BatchWorker.answer` returns."""
        spec = self.spec
        files: list[str] = []
        rows: list[Row] = []
        for row_range in part.row_ranges:
            for row in self._open_table(row_range.file).read(row_range, spec.all_columns):
                files.append(row_range.file)
                rows.append(row)
        if len(rows) != part.rows:
            raise BatchError(
                f"{part.row_ranges[0].file} changed while it was read: {len(rows)} rows, not {part.rows}"
            )
        good = [number for number, row in enumerate(rows) if row.error is None]
        outputs: list[dict[str, Any]] = [{ERROR: row.error} for row in rows]
        answers = self.worker.answer_rows([rows[number].values[: len(spec.columns)] for number in good])
        for number, answer in zip(good, answers, strict=True):
            outputs[number] = answer
        keys = {
            "id": pa.array(list(map(make_id(spec), files, rows)), type=pa.string()),
            "file": pa.array(files, type=pa.string()),
            "row": pa.array([row.number for row in rows], type=pa.int64()),
        }
        table = self.worker.make_table(outputs)
        return pa.table({**keys, **dict(zip(table.column_names, table.columns, strict=True))})

    def _open_table(self, name: str) -> TableFile:
        """Return a file of the input; the last one stays open."""
        if self._table is None or self._table[0] != name:
            self._table = (name, self.spec.source.open_table(name))
        return self._table[1]


def make_id(spec: JobSpec) -> Callable[[str, Row], str | None]:
    """Return what makes a row's id of its file and itself."""

    def read_id(file: str, row: Row) -> str | None:
        if row.error is not None:
            return None
        value = row.values[-1]
        if isinstance(value, bytes):
            return value.decode(errors="backslashreplace")
        return None if value is None else str(value).encode(errors="backslashreplace").decode()

    def hash_place(file: str, row: Row) -> str:
        return hashlib.sha256(f"{file}\0{row.number}".encode()).hexdigest()[:32]

    return read_id if spec.id_column else hash_place


def hash_bundle(folder: str) -> str:
    """Return the hash of a bundle's manifest, which has those of its files."""
    bundle = Bundle.open(folder)
    return hashlib.sha256((bundle.folder / "manifest.json").read_bytes()).hexdigest()


def name_worker() -> str:
    """Return this process's name among all workers."""
    return f"{socket.gethostname()}:{os.getpid()}"


_open: list[PartRunner] = []  # the runner of the job that this process works for


def open_runner(spec: JobSpec) -> PartRunner:
    """Return the runner of a job; a process opens it once."""
    if not _open or _open[0].spec != spec:
        close_runner()
        _open.append(PartRunner(spec))
    return _open[0]


def close_runner() -> None:
    """Free the model that this process has loaded."""
    while _open:
        _open.pop().worker.close()


def run_part(spec: JobSpec, part: Part) -> PartResult | Failure:
    """Compute and write a part in this process; return why it cannot go on where no worker could."""
    try:
        runner = open_runner(spec)
    except PlanForgeError as error:  # returned, as not each of them can be pickled
        return Failure(f"a worker could not begin: {error}")
    try:
        return runner.run(part)
    except Exception as error:
        log.debug("part %d", part.number, exc_info=True)
        row_range = part.row_ranges[0]
        reason = str(error) if isinstance(error, PlanForgeError) else f"{type(error).__name__}: {error}"
        return Failure(
            f"{part.file}, which begins at row {row_range.first} of {row_range.file}, failed: {reason}"
        )
