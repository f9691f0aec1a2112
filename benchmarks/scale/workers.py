"""Embeds the lines of a file by one system, and prints who ended which batch when; rates.py runs it."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from planforge.runtime.apps.batch import BatchWorker, run_batch
from planforge.runtime.apps.batch import job as job_module
from planforge.runtime.apps.batch.result import PartResult

from .rates import BATCH

Ends = list[tuple[str, float, int]]


class Timed(BatchWorker):
    """A worker for Ray Data whose rows say who computed them, and when their batch was done."""

    def __call__(self, batch: Mapping[str, np.ndarray]) -> pa.Table:
        table = super().__call__(batch)
        count = len(table)
        table = table.append_column("worker", pa.array([str(os.getpid())] * count))
        return table.append_column("end", pa.array([time.time()] * count))


def run_loop(bundle: str, folder: Path, workers: int) -> Ends:
    """Answer batches one after the other in this process, and write them as a job does."""
    import pyarrow.parquet as pq

    worker = BatchWorker(bundle, "embed", load_options={"threads": 1})
    lines = (folder / "in.txt").read_text().splitlines()
    ends: Ends = []
    for first in range(0, len(lines), BATCH):
        texts = lines[first : first + BATCH]
        pq.write_table(worker.answer({"text": texts}), folder / f"{first}.parquet")
        ends.append(("loop", time.time(), len(texts)))
    return ends


def run_actors(bundle: str, folder: Path, workers: int) -> Ends:
    """Let actors of Ray Data answer and write."""
    import ray

    cluster = start_nodes(workers)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    lines = (folder / "in.txt").read_text().splitlines()
    rows = [{"text": line} for line in lines]
    answers = ray.data.from_items(rows, override_num_blocks=len(lines) // BATCH).map_batches(
        Timed,
        fn_constructor_args=(bundle, "embed"),
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=1,
        batch_size=BATCH,
    )
    answers.write_parquet(str(folder / "out"))
    ends: dict[tuple[str, float], int] = {}
    for row in ray.data.read_parquet(str(folder / "out"), columns=["worker", "end"]).iter_rows():
        key = (row["worker"], row["end"])
        ends[key] = ends.get(key, 0) + 1
    ray.shutdown()
    cluster.shutdown()
    return [(worker, end, count) for (worker, end), count in ends.items()]


def start_nodes(workers: int, spare: int = 1) -> Any:
    """Start a cluster with a node of one CPU for each worker, and a spare one to read and write data sets."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": spare, "include_dashboard": False})
    for _ in range(workers):
        cluster.add_node(num_cpus=1)
    return cluster


def run_job(bundle: str, folder: Path, workers: int | None, address: str | None) -> Ends:
    """Run a job, and note when each part was done."""
    ends: Ends = []
    add = job_module.Counting.add

    def note(self: job_module.Counting, result: PartResult) -> None:
        ends.append((result.worker, time.time(), result.rows))
        add(self, result)

    job_module.Counting.add = note  # type: ignore[method-assign]
    run_batch(
        bundle,
        "embed",
        folder / "in.txt",
        folder / "out",
        workers=workers,
        address=address,
        rows_per_part=BATCH,
    )
    return ends


def run_processes(bundle: str, folder: Path, workers: int) -> Ends:
    return run_job(bundle, folder, workers, None)


def run_tasks(bundle: str, folder: Path, workers: int) -> Ends:
    """Run a job on a cluster that has a node for each worker."""
    cluster = start_nodes(workers, spare=0)
    try:
        return run_job(bundle, folder, None, cluster.address)
    finally:
        cluster.shutdown()


RUNNERS: dict[str, Callable[[str, Path, int], Ends]] = {
    "loop": run_loop,
    "actors": run_actors,
    "processes": run_processes,
    "tasks": run_tasks,
}


def main() -> None:
    name, bundle, folder, workers = sys.argv[1:]
    ends = RUNNERS[name.partition("-")[0]](bundle, Path(folder), int(workers))
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
