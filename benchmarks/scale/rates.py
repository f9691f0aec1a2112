"""Measures how many rows a second workers embed: a plain loop, processes, Ray's tasks and Ray Data's actors.

A rate is that of the steady state: of each worker the rows after its first batch, over the time from that
batch's end to its last one's. What starting takes is told apart.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..machine import BusyMeter
from .sentences import make_sentences

BATCH = 1000  # sentences
BATCHES = 6  # of each worker
# What is measured: how many workers of one thread it has.
SYSTEMS = {
    "loop": 1,
    "actors-1": 1,
    "actors-2": 2,
    "processes-1": 1,
    "processes-2": 2,
    "tasks-1": 1,
    "tasks-2": 2,
}


def measure_rates(bundle: Path, work: Path, rounds: int) -> dict[str, Any]:
    """Measure every system, a round after the other; return medians, and the ratios within a round."""
    rates: dict[str, list[float]] = defaultdict(list)
    starts: dict[str, list[float]] = defaultdict(list)
    busy = []
    for number in range(rounds):
        for name, workers in SYSTEMS.items():
            folder = work / f"{name}-{number}"
            folder.mkdir()
            (folder / "in.txt").write_text("\n".join(make_sentences(BATCH * BATCHES * workers)))
            command = [
                sys.executable,
                "-m",
                "benchmarks.scale.workers",
                name,
                str(bundle),
                str(folder),
                str(workers),
            ]
            meter = BusyMeter()
            began = time.time()
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            if name.startswith(("loop", "processes")):  # Ray's own processes are nobody's children
                busy.append(meter.share())
            ends = [tuple(end) for end in json.loads(done.stdout.splitlines()[-1])]
            rates[name].append(find_rate(ends))
            starts[name].append(min(end for _, end, _ in ends) - began)
            print(f"{name}: {rates[name][-1]:.1f} rows/s", file=sys.stderr)
    return {
        "rows_per_batch": BATCH,
        "rows_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "seconds_to_first_batch": {
            name: round(statistics.median(values), 1) for name, values in starts.items()
        },
        "ratios": {name: compare(rates, *pair) for name, pair in RATIOS.items()},
        "core_hours_per_million_rows": round(1e6 / statistics.median(rates["loop"]) / 3600, 2),
        "machine": {"busy": round(max(busy), 3)},
    }


# Of the medians' ratios within a round.
RATIOS = {
    "two actors to one": ("actors-2", "actors-1"),
    "two processes to one": ("processes-2", "processes-1"),
    "two tasks to one": ("tasks-2", "tasks-1"),
    "one actor to the loop": ("actors-1", "loop"),
    "one process to the loop": ("processes-1", "loop"),
    "one task to the loop": ("tasks-1", "loop"),
}


def compare(rates: dict[str, list[float]], one: str, other: str) -> float:
    """Return the median of two systems' ratio within a round."""
    return round(statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True)), 3)


def find_rate(ends: Iterable[tuple[str, float, int]]) -> float:
    """Return rows a second of all workers: a batch is its worker's name, the time of its end, its rows."""
    by_worker: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for worker, end, rows in ends:
        by_worker[worker].append((end, rows))
    rate = 0.0
    for batches in by_worker.values():
        (first, _), *rest = sorted(batches)
        if rest:
            rate += sum(rows for _, rows in rest) / (rest[-1][0] - first)
    return rate
