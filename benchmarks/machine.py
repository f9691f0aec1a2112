"""What the machine itself can do, measured in the same run as the systems."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from planforge.runtime.bench import READ_BYTES, read_bandwidth

STAT = Path("/proc/stat")


def measured_machine(threads: int) -> dict[str, float]:
    """What `threads` threads read per second, and fp32 operations of a large product; the best of five.

    Also how busy others keep the processors meanwhile that nothing is measured, from 0 to 1.
    """
    busy = busy_share(1.0)
    block = np.ones(READ_BYTES // 8, np.int64)
    matrix = np.ones((3072, 3072), np.float32)
    read, best_product = 0.0, float("inf")
    for _ in range(5):
        read = max(read, read_bandwidth(block, threads))
        start = time.perf_counter()
        matrix @ matrix
        best_product = min(best_product, time.perf_counter() - start)
    return {
        "busy": round(busy, 2),
        "read_gb_per_s": round(read / 1e9, 1),
        "gflop_per_s": round(2 * len(matrix) ** 3 / best_product / 1e9, 1),
    }


def busy_share(seconds: float) -> float:
    """Of the processors' time during a sleep, how much was used or stolen (Linux; elsewhere 0)."""
    if not STAT.exists():
        return 0.0
    before = np.array(STAT.read_text(encoding="utf-8").splitlines()[0].split()[1:9], int)
    time.sleep(seconds)
    passed = np.array(STAT.read_text(encoding="utf-8").splitlines()[0].split()[1:9], int) - before
    idle = passed[3] + passed[4]  # idle and waiting for input or output
    return float(1 - idle / max(1, passed.sum()))
