"""Measures what one driver, one reader, one writer and one object store manage in a second."""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from planforge.runtime.apps.batch.formats import open_table
from planforge.runtime.apps.batch.job import Counting, compute
from planforge.runtime.apps.batch.part_runner import JobSpec
from planforge.runtime.apps.batch.plan import Part, Source
from planforge.runtime.apps.batch.ray_engine import RayEngine
from planforge.runtime.apps.batch.result import PartResult
from planforge.runtime.apps.batch.storage import Storage
from planforge.runtime.apps.batch.table_file import RowRange

from .sentences import make_sentences

ROWS = 100_000
ROWS_PER_PART = 1000
WIDTH = 384  # numbers of a vector
TASKS = 5000
SLOTS = (8, 500, 4000)  # parts in flight: twice the workers
ROUNDS = 3


def measure_limits(work: Path) -> dict[str, Any]:
    """Measure each limit; return parts, rows and megabytes a second."""
    return {
        "rows_per_part": ROWS_PER_PART,
        "vector_numbers": WIDTH,
        "dispatch": {"processes_parts_per_s": dispatch_to_processes(), **measure_ray(work)},
        "read_and_cut": {
            kind: measure_reading(work, kind) for kind in (".txt", ".jsonl", ".csv", ".parquet")
        },
        "write": measure_writing(work),
    }


def median_seconds(work: Callable[[], object]) -> float:
    """Return the median time of a few runs, after one that does not count."""
    seconds = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def do_nothing(spec: object, part: Part) -> Part:
    """Stand for a part's work."""
    return part


def make_part(number: int) -> Part:
    return Part(number, (RowRange("folder/file-000001.parquet", number * 1000, 1000, 0, 0),))


def dispatch_to_processes() -> float:
    """Return how many parts a second a driver starts and gets back, by processes."""
    with ProcessPoolExecutor(2) as pool:

        def run() -> None:
            running = set()
            for number in range(TASKS):
                running.add(pool.submit(do_nothing, None, make_part(number)))
                if len(running) == 8:
                    _, running = wait(running, return_when=FIRST_COMPLETED)
            wait(running)

        return round(TASKS / median_seconds(run))


class NoWork(RayEngine):
    """An engine whose tasks do nothing, of a cluster with as many slots as it is told."""

    def __init__(self, spec: JobSpec, slots: int) -> None:
        super().__init__(spec, "auto", threads=1, gpus=0)
        self.slots = slots
        self._task: Any = ray.remote(count_rows).options(max_retries=0)

    def count_slots(self) -> int:
        super().count_slots()  # which asks the cluster now and then
        return self.slots


def count_rows(spec: object, part: Part) -> PartResult:
    """Stand for a part's work."""
    return PartResult(part.number, part.rows, 0, 0, 0.001, "nobody")


def measure_ray(work: Path) -> dict[str, Any]:
    """Return parts that a driver starts and counts by Ray, and megabytes through its object store."""
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    source = Source(Storage.of(work), is_file=False)
    spec = JobSpec("bundle", "hash", "embed", {"text": "text"}, source, Storage.of(work / "out"))
    rates = {}
    for slots in SLOTS:

        def run(slots: int = slots) -> None:
            engine = NoWork(spec, slots)
            compute(
                engine, map(make_part, range(TASKS)), Counting(lambda line: None, 0, TASKS * ROWS_PER_PART)
            )

        rates[str(slots)] = round(TASKS / median_seconds(run))
    table = make_answers()
    copies = 50

    def put_and_get() -> None:
        for _ in range(copies):
            ray.get(ray.put(table))

    megabytes = table.nbytes * copies / 1e6 / median_seconds(put_and_get)
    ray.shutdown()
    return {"ray_parts_per_s_by_slots": rates, "object_store_mb_per_s": round(megabytes)}


def measure_reading(work: Path, kind: str) -> dict[str, float]:
    """Return how fast one process cuts a file into parts, and reads them."""
    path = work / f"input{kind}"
    write_input(path, make_sentences(ROWS))
    storage = Storage.of(work)

    def cut() -> list[RowRange]:
        return [RowRange(path.name, *place) for place in open_table(storage, str(path)).cut(ROWS_PER_PART)]

    row_ranges = cut()

    def read() -> None:
        table = open_table(storage, str(path))
        for row_range in row_ranges:
            for _ in table.read(row_range, ["text"]):
                pass

    return {
        "cut_rows_per_s": round(ROWS / median_seconds(cut)),
        "read_rows_per_s": round(ROWS / median_seconds(read)),
    }


def write_input(path: Path, texts: list[str]) -> None:
    """Write texts as a file of the kind that its name says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path)
        return
    lines = {
        ".txt": texts,
        ".jsonl": [json.dumps({"text": text}) for text in texts],
        ".csv": ["text", *texts],
    }[path.suffix]
    path.write_text("\n".join(lines))


def make_answers() -> pa.Table:
    """Return the answers to a part: vectors and their other fields."""
    vectors = np.random.default_rng(0).standard_normal((ROWS_PER_PART, WIDTH)).astype(np.float32)
    return pa.table(
        {
            "id": [f"{number:032x}" for number in range(ROWS_PER_PART)],
            "embedding": pa.array(list(vectors), type=pa.list_(pa.float32())),
            "error": pa.nulls(ROWS_PER_PART, pa.string()),
        }
    )


def measure_writing(work: Path) -> dict[str, float]:
    """Return how fast one process writes parts to this machine's disk."""
    storage = Storage.of(work / "written")
    table = make_answers()
    parts = 20

    def write() -> None:
        for number in range(parts):
            buffer = pa.BufferOutputStream()
            pq.write_table(table, buffer)
            storage.write(make_part(number).file, buffer.getvalue())

    seconds = median_seconds(write)
    size = (work / "written" / make_part(0).file).stat().st_size
    return {
        "rows_per_s": round(ROWS_PER_PART * parts / seconds),
        "mb_per_s": round(size * parts / 1e6 / seconds),
        "bytes_per_row": round(size / ROWS_PER_PART),
    }
