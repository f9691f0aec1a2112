"""Measures the cost of a job for the process that drives it, by the number of rows: seconds and memory.

Parts are written by a stand-in for the workers in the driver itself, so that only the driver's own work is
left: cutting the input, starting parts, counting, and, when it goes on with a job, finding what is done.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from .workers import start_nodes

ROWS_PER_PART = 1000
RESUMED = 100_000  # rows


def measure_drivers(counts: list[int], work: Path) -> list[dict[str, Any]]:
    """Measure jobs of so many rows, each in a process of its own."""
    results = []
    for rows in counts:
        folder = work / f"driver-{rows}"
        folder.mkdir()
        with (folder / "in.txt").open("w") as file:
            file.writelines(f"row {number}\n" for number in range(rows))
        results.append({"rows": rows, **run(folder, "first"), **run(folder, "again")})
        print(results[-1], file=sys.stderr)
    return results


def measure_resume(bundle: Path, work: Path) -> dict[str, float]:
    """Return the seconds of the whole command that resumes 100,001 rows of which one is missing."""
    folder = work / "resume"
    folder.mkdir()
    (folder / "in.txt").write_text("\n".join(f"row {number}" for number in range(RESUMED + 1)))
    seconds = {}
    for name, options in (
        ("processes", []),
        ("ray", ["--address", "auto"]),
        ("ray_local", ["--address", "local"]),
    ):
        code = "import sys; from benchmarks.scale.driver import resume; resume(*sys.argv[1:])"
        output = folder / name
        arguments = [sys.executable, "-c", code, str(bundle), str(folder / "in.txt"), str(output)]
        subprocess.run([*arguments, "first"], check=True)
        if name == "ray":
            cluster = start_nodes(2)
        began = time.perf_counter()
        subprocess.run([*arguments, "again", *options[1:]], check=True)
        seconds[f"{name}_s"] = round(time.perf_counter() - began, 2)
        if name == "ray":
            cluster.shutdown()
    return seconds


def resume(bundle: str, source: str, output: str, which: str, address: str | None = None) -> None:
    """Run a job: first by the stand-in, then by workers, with its last part missing."""
    from planforge.runtime.apps.batch import job

    if which == "first":
        job.open_engine = lambda spec, *rest, **more: StandIn(spec)
        job.run_batch(bundle, "embed", source, output)
        max(Path(output).glob("part-*")).unlink()
        return
    result = job.run_batch(bundle, "embed", source, output, address=address)
    assert result.computed == 1, result


def run(folder: Path, which: str) -> dict[str, Any]:
    """Run a job in a process of its own, anew or again, with its last part missing."""
    command = [sys.executable, "-m", "benchmarks.scale.driver", str(folder), which]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


class StandIn:
    """A stand-in for workers that writes each part at once, with rows but no vectors."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.ended: deque[Any] = deque()

    def count_slots(self) -> int:
        return 8

    def start(self, part: Any) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from planforge.runtime.apps.batch.part_runner import COUNTS
        from planforge.runtime.apps.batch.result import PartResult

        table = pa.table({"row": pa.array(range(part.rows))})
        counts = json.dumps({"rows": part.rows, "errors": 0, "tokens": part.rows}).encode()
        buffer = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata({COUNTS: counts}), buffer)
        self.spec.output.write(part.file, buffer.getvalue())
        self.ended.append((part, PartResult(part.number, part.rows, 0, part.rows, 0.001, "stand-in")))

    def wait(self) -> list[Any]:
        return [self.ended.popleft()]

    def close(self) -> None:
        self.ended.clear()


def main() -> None:
    """Run one job, and print its cost."""
    from planforge.runtime.apps.batch import job

    folder = Path(sys.argv[1])
    which = sys.argv[2]
    job.open_engine = lambda spec, *rest, **more: StandIn(spec)
    job.check_bundle = lambda bundle, task: None
    job.hash_bundle = lambda folder: "none"  # type: ignore[attr-defined]
    output = folder / "out"
    if which == "again":
        max(output.glob("part-*")).unlink()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    result = job.run_batch("none", "embed", folder / "in.txt", output, rows_per_part=ROWS_PER_PART)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    expected = result.rows if which == "first" else ROWS_PER_PART
    assert result.computed == expected, result
    memory = {f"{which}_peak_mb": round(peak / 1e3, 1), f"{which}_grown_mb": round((peak - before) / 1e3, 1)}
    print(json.dumps({f"{which}_s": round(seconds, 2), **memory}))


if __name__ == "__main__":
    main()
