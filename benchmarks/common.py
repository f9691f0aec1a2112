"""The parts that all benchmarks share: the machine's facts, result files, the cost of a command."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from planforge.runtime.apps.diagnostics.machine import find_processor_name

from .machine import find_instruction_set

RESULTS = Path(__file__).parent / "results"
PLACES = {"rss": "VmRSS", "anonymous": "RssAnon"}  # of memory, by Linux's names


def environment() -> dict[str, Any]:
    """Return the processor, and the versions of the measured packages."""
    versions: dict[str, str | None] = {}
    for name in ("planforge", "torch", "onnxruntime", "onnx", "transformers", "tensorrt_rtx_cu13", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "cpu": find_processor_name(),
        "instruction_set": find_instruction_set(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def write_result(name: str, result: dict[str, Any]) -> None:
    """Print a result and keep it under results/."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"environment": environment(), **result}, indent=1) + "\n"
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")
    print(text, end="")


def measure_command_cost(command: Sequence[str | Path], may_object: bool = False) -> dict[str, Any]:
    """Measure a command's seconds, of clock and processors, and all its processes' peak memory (Linux).

    Resident memory counts pages of mapped files, which the system takes back when it needs them; anonymous
    memory does not.

    Args:
        may_object: whether it may end with 1, as a check does that finds something.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    alone = {**os.environ, "PLANFORGE_ANSWERS_MB": "0"}  # no run is quicker for what another has kept
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, env=alone)
    peaks = dict.fromkeys(PLACES, 0)
    while process.poll() is None:
        sizes = [read_sizes(number) for number in list_processes(process.pid)]
        peaks = {kind: max(peak, sum(size[kind] for size in sizes)) for kind, peak in peaks.items()}
        time.sleep(0.05)
    if process.returncode > may_object:
        sys.exit(f"{command[0]} failed with exit code {process.returncode}")
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    memory = {f"peak_{kind}_mb": round(peak / 1e6) for kind, peak in peaks.items()}
    return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), **memory}


def list_processes(number: int) -> list[int]:
    """Return a process and all below it, whichever of its threads started them (Linux)."""
    children: list[str] = []
    for path in Path(f"/proc/{number}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            children += path.read_text().split()
    return [number, *(other for child in children for other in list_processes(int(child)))]


def read_sizes(number: int) -> dict[str, int]:
    """Return the bytes that a process has now, by the names of `PLACES`; 0 if it has ended (Linux)."""
    try:
        text = Path(f"/proc/{number}/status").read_text()
    except OSError:
        text = ""
    found = {kind: re.search(rf"^{name}:\s+([0-9]+) kB", text, re.MULTILINE) for kind, name in PLACES.items()}
    return {kind: 1024 * int(match[1]) if match else 0 for kind, match in found.items()}
