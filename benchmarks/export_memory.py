"""The peak memory of `planforge export`, of all its processes together (Linux).

python -m benchmarks.export_memory CHECKPOINT BUNDLE [options of planforge export]

Resident memory counts pages of mapped files, which the system takes back when it needs them; anonymous memory
does not. Both are sampled 50 times a second.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PLACES = {"resident": "VmRSS", "anonymous": "RssAnon"}


def measure_export(checkpoint: Path, bundle: Path, options: list[str]) -> dict[str, Any]:
    """Return the peaks in MB, of all processes together and of the first alone, and the seconds.

    Beside them stand the bytes of the checkpoint's weights.
    """
    planforge = Path(sys.executable).with_name("planforge")
    command = [str(planforge), "export", str(checkpoint), "-o", str(bundle), "--force", *options]
    peaks = dict.fromkeys((f"{kind}_{whose}" for kind in PLACES for whose in ("all", "first")), 0)
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        sizes = [read_sizes(number) for number in list_processes(process.pid)]
        for kind in PLACES:
            peaks[f"{kind}_all"] = max(peaks[f"{kind}_all"], sum(size[kind] for size in sizes))
            peaks[f"{kind}_first"] = max(peaks[f"{kind}_first"], sizes[0][kind])
        time.sleep(0.02)
    if process.returncode:
        sys.exit(f"planforge export failed with exit code {process.returncode}")
    weights = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    return {
        "checkpoint_mb": round(weights / 1e6),
        **{f"{name}_mb": round(peak / 1e6) for name, peak in peaks.items()},
        "seconds": round(time.perf_counter() - started, 1),
    }


def list_processes(number: int) -> list[int]:
    """Return a process and all below it, whichever of its threads started them."""
    children: list[str] = []
    for path in Path(f"/proc/{number}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            children += path.read_text().split()
    return [number, *(other for child in children for other in list_processes(int(child)))]


def read_sizes(number: int) -> dict[str, int]:
    """Return the bytes that a process has now; 0 of one that has gone."""
    try:
        text = Path(f"/proc/{number}/status").read_text()
    except OSError:
        text = ""
    found = {kind: re.search(rf"^{name}:\s+([0-9]+) kB", text, re.MULTILINE) for kind, name in PLACES.items()}
    return {kind: 1024 * int(match[1]) if match else 0 for kind, match in found.items()}


if __name__ == "__main__":
    print(json.dumps(measure_export(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]), indent=2))
