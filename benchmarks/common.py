"""What every benchmark shares: the machine's facts, result files, the cost of a command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from planforge.runtime.diagnostics.machine import find_processor_name

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """The processor, and the versions of what was measured."""
    versions: dict[str, str | None] = {}
    for name in ("planforge", "torch", "onnxruntime", "onnx", "transformers", "tensorrt_rtx_cu13", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "cpu": find_processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def write_result(name: str, result: dict[str, Any]) -> None:
    """Prints a result and keeps it under results/."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"environment": environment(), **result}, indent=1) + "\n"
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")
    print(text, end="")


def measure_command_cost(command: Sequence[str | Path], may_object: bool = False) -> dict[str, Any]:
    """Seconds of a command, and the peak memory of all its processes together (Linux).

    Args:
        may_object: whether it may end with 1, as a check does that finds something.
    """
    started = time.perf_counter()
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
    together = 0
    while process.poll() is None:
        together = max(together, tree_rss(process.pid))
        time.sleep(0.1)
    if process.returncode > may_object:
        sys.exit(f"{command[0]} failed with exit code {process.returncode}")
    return {"seconds": round(time.perf_counter() - started, 2), "peak_rss_mb": round(together / 1e6)}


def tree_rss(pid: int) -> int:
    """Resident bytes of a process and all below it (Linux)."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(tree_rss(int(child)) for child in children)
