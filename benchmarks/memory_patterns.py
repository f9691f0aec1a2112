"""What ONNX Runtime's memory patterns cost and save on a CPU: time and memory of an encoder's batches.

python -m benchmarks.memory_patterns BERT-BUNDLE
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from .common import write_result

SHAPES = ((1, 16), (1, 128), (4, 256))
ROUNDS = 25


def open_session(graph: Path, has_patterns: bool) -> ort.InferenceSession:
    """Return a session of one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_mem_pattern = has_patterns
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def make_inputs(session: ort.InferenceSession, batch: int, length: int) -> dict[str, Any]:
    """Return ones for every input."""
    return {one.name: np.ones((batch, length), np.int64) for one in session.get_inputs()}


def compare_times(graph: Path, batch: int, length: int) -> dict[str, float]:
    """Return the median milliseconds with patterns and without, measured in turns."""
    sessions = {name: open_session(graph, name == "with") for name in ("with", "without")}
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for number in range(ROUNDS + 2):
        for name, session in sessions.items():
            inputs = make_inputs(session, batch, length)
            started = time.perf_counter()
            session.run(None, inputs)
            if number > 1:  # the first are warm-up
                times[name].append(1000 * (time.perf_counter() - started))
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        **{f"ms_{name}": round(ms, 3) for name, ms in medians.items()},
        "ratio": round(medians["without"] / medians["with"], 3),
    }


def measure_memory(graph: Path, has_patterns: bool) -> float:
    """Return the megabytes that runs of all shapes take beyond the loaded session; in this process."""
    session = open_session(graph, has_patterns)
    before = read_anonymous()
    for batch, length in SHAPES * 2:
        session.run(None, make_inputs(session, batch, length))
    return (read_anonymous() - before) / 1e6


def read_anonymous() -> int:
    """Return the bytes of memory that belong to no file."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def main(bundle: Path) -> None:
    """Measure, and write the result."""
    (graph,) = bundle.glob("onnx/encoder.ort.fp32*.onnx")
    memory = {}
    for name in ("with", "without"):
        command = [sys.executable, "-m", __spec__.name, str(graph), name]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
        memory[name] = round(float(done.stdout), 1)
    times = {f"{batch} x {length}": compare_times(graph, batch, length) for batch, length in SHAPES}
    write_result("memory_patterns", {"threads": 1, "beyond_session_mb": memory, "times": times})


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(measure_memory(Path(sys.argv[1]), sys.argv[2] == "with"))
    else:
        main(Path(sys.argv[1]))
