"""Runs a job on a Ray cluster of three nodes while its workers, its raylets and its driver are killed.

`python -m tests.runtime.apps.batch.cluster_kills BUNDLE OUTPUT` takes verses of the King James Bible, says
what it killed, and fails unless every row has one answer, which is a single process's, and nothing is left
behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from ray.cluster_utils import Cluster

from ....helpers.patience import PATIENCE

WORKER = b"ray::planforge-"  # what Ray calls a process that is at one of our tasks
RAY = (b"ray::", b"raylet", b"gcs_server")  # what is in the names of a cluster's processes
NODES = 3
SECONDS = 600  # for a job, however often it begins anew


class Job:
    """A command that is started again whenever it was killed."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.command = command
        self.log = log
        self.starts = 0
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        return self.process

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Hold its driver back, so that a quick machine's job does not end before all is killed."""
        self.process.send_signal(signal.SIGSTOP)
        yield
        self.process.send_signal(signal.SIGCONT)

    def has_ended(self) -> bool:
        """Return whether it has done its work; start it again where it was killed."""
        code = self.process.poll()
        if code is None:
            return False
        if code == 0:
            return True
        self.start()
        return False


class Victims:
    """A cluster's processes that may be killed."""

    def __init__(self, cluster: Cluster, job: Job, draw: random.Random) -> None:
        self.cluster = cluster
        self.job = job
        self.draw = draw
        self.counts: Counter[str] = Counter()

    def kill_one(self) -> None:
        """Kill something, as `kill -9` does; a raylet's node is replaced."""
        kind = self.draw.choice(["worker", "raylet", "driver"])
        if kind == "worker":
            workers = find_workers()
            if not workers:
                return
            kill(self.draw.choice(workers))
        elif kind == "raylet":
            nodes = [node for node in self.cluster.worker_nodes if node is not self.cluster.head_node]
            node = self.draw.choice(sorted(nodes, key=lambda one: str(one.unique_id)))
            kill(node.all_processes["raylet"][0].process.pid)
            with self.job.pause():
                self.cluster.remove_node(node, allow_graceful=False)
                self.cluster.add_node(num_cpus=1)
        else:
            kill(self.job.process.pid)
            self.job.process.wait()
        self.counts[kind] += 1


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def find_workers() -> list[int]:
    """Return the processes that are at a task of a job."""
    return find_processes(lambda command: command.startswith(WORKER))


def find_cluster() -> list[int]:
    """Return the processes of a cluster, idle workers that hold a model among them."""
    return find_processes(lambda command: any(name in command.partition(b"\0")[0] for name in RAY))


def find_processes(is_wanted: Callable[[bytes], bool]) -> list[int]:
    """Return the processes whose command is wanted."""
    numbers = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if is_wanted(path.read_bytes()):
                numbers.append(int(path.parent.name))
    return sorted(numbers)


@contextmanager
def run_cluster() -> Iterator[Cluster]:
    """Run a cluster of three nodes of one CPU, and leave none of its processes."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


def make_command(bundle: Path, source: Path, output: Path, *options: str) -> list[str]:
    """Return the command that embeds a file."""
    code = "from planforge.exporter.commands import main; main()"
    paths = [str(bundle), "--task", "embed", "--input", str(source), "--output", str(output)]
    return [sys.executable, "-c", code, "batch", *paths, *options]


def run_among_kills(
    bundle: Path, source: Path, output: Path, rows: Sequence[str], *, kills: int, parts: int, seed: int
) -> Victims:
    """Run a job whose output has so many parts, and kill something at so many random points of it."""
    draw = random.Random(seed)
    points = sorted(draw.random() * 0.98 * parts for _ in range(kills))
    with run_cluster() as cluster:
        command = make_command(bundle, source, output, "--address", cluster.address, *rows)
        job = Job(command, output.with_suffix(".log"))
        victims = Victims(cluster, job, draw)
        deadline = time.monotonic() + SECONDS
        while not job.has_ended():
            done = len(list(output.glob("part-*.parquet")))
            if sum(victims.counts.values()) < kills and done >= points[sum(victims.counts.values())]:
                victims.kill_one()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{done} of {parts} parts after {SECONDS} s; see {job.log}")
            time.sleep(draw.uniform(0.02, 0.1))
        wait_for_none(find_workers, "workers that are left")
    wait_for_none(find_cluster, "processes of the cluster that are left")
    assert sum(victims.counts.values()) == kills, f"killed only {dict(victims.counts)}"
    return victims


def wait_for_none(find: Any, what: str, seconds: float = PATIENCE) -> None:
    """Wait until `find` returns nothing."""
    deadline = time.monotonic() + seconds
    while left := find():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: {left}")
        time.sleep(0.2)


def compare_outputs(output: Path, expected: Path) -> int:
    """Return how many rows two outputs have; fail unless they are equal, each id once."""
    tables = [pq.read_table(folder).sort_by("id") for folder in (output, expected)]
    ids = tables[0].column("id").to_pylist()
    assert len(set(ids)) == len(ids)
    assert tables[0].equals(tables[1])
    left = [path.name for path in output.rglob("*") if not path.name.startswith("part-")]
    assert sorted(left) == ["_job", "job.json", "lock", "plan.jsonl"], left
    return len(ids)


def write_verses(path: Path, count: int) -> None:
    """Write verses of the King James Bible, a line each, as the program `bible` prints them."""
    done = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], capture_output=True, text=True, check=True)
    verses = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    path.write_text("\n".join(verses[:count]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--input", type=Path, help="verses of the King James Bible unless given (apt install bible-kjv)"
    )
    parser.add_argument("--verses", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rows-per-part", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="a file of JSON for what happened")
    given = parser.parse_args()
    source = given.input
    if source is None:
        source = given.output.with_name(f"{given.output.name}-verses.txt")
        write_verses(source, given.verses)
    rows = ("--rows-per-part", str(given.rows_per_part))
    expected = given.output.with_name(f"{given.output.name}-expected")
    subprocess.run(make_command(given.bundle, source, expected, "--workers", "1", *rows), check=True)
    parts = len(list(expected.glob("part-*.parquet")))
    began = time.monotonic()
    victims = run_among_kills(
        given.bundle, source, given.output, rows, kills=given.kills, parts=parts, seed=given.seed
    )
    seconds = time.monotonic() - began
    count = compare_outputs(given.output, expected)
    print(f"killed: {dict(victims.counts)}; the driver was started {victims.job.starts} times")
    print(f"{count:,} rows, each id once, equal to one process's, after {seconds:.0f} s")
    if given.record is not None:
        result = {"rows": count, "parts": parts, "killed": victims.counts, "seconds": round(seconds)}
        given.record.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
