"""Measures the machine itself, in the same run as the systems."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from planforge.runtime.apps.diagnostics.bench import READ_BYTES, read_bandwidth
from planforge.runtime.backends.requirements import CPUINFO, read_x86_flags

STAT = Path("/proc/stat")
BUSY = 0.1  # of the processors' time; figures during that much other work mean little


# Of x86 processors, the best first: the name, and the feature in Linux's words.
INSTRUCTION_SETS = {
    "AMX": "amx_int8",
    "AVX-512 VNNI": "avx512_vnni",
    "AVX-VNNI": "avx_vnni",
    "AVX-512": "avx512f",
    "AVX2": "avx2",
}
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def find_instruction_set(cpuinfo: Path = CPUINFO, machine: str = platform.machine()) -> str:
    """Return the best instructions that programs see; under `python -m tests.avx2` "AVX2"."""
    flags = read_x86_flags(machine, cpuinfo) or ()
    return next((name for name, flag in INSTRUCTION_SETS.items() if flag in flags), machine)


def find_cache_mb(caches: Path = CACHES) -> float:
    """Return the size of the processor's last cache in MB; 0 where the system does not say."""
    sizes = [path.read_text(encoding="ascii").strip() for path in caches.glob("index*/size")]
    kilobytes = [int(found[1]) for size in sizes if (found := re.fullmatch(r"(\d+)K", size))]
    return max(kilobytes, default=0) * 1024 / 1e6


def measure_machine(threads: int) -> dict[str, Any]:
    """Measure the bytes that threads read per second, and fp32 operations of a product; the best of five.

    Also how busy others keep the processors meanwhile that nothing is measured, from 0 to 1; and the names of
    the instructions, with the size of the last cache.
    """
    busy = busy_share(1.0)
    block = np.ones(READ_BYTES // 8, np.int64)
    matrix = np.ones((3072, 3072), np.float32)
    read = 0.0
    best_product = float("inf")
    for _ in range(5):
        read = max(read, read_bandwidth(block, threads))
        start = time.perf_counter()
        matrix @ matrix
        best_product = min(best_product, time.perf_counter() - start)
    return {
        "instruction_set": find_instruction_set(),
        "last_cache_mb": round(find_cache_mb(), 1),
        "busy": round(busy, 2),
        "read_gb_per_s": round(read / 1e9, 1),
        "gflop_per_s": round(2 * len(matrix) ** 3 / best_product / 1e9, 1),
    }


def busy_share(seconds: float) -> float:
    """Return the share of the processors' time used or stolen during a sleep (Linux; elsewhere 0)."""
    used, passed = processor_ticks()
    time.sleep(seconds)
    used_after, passed_after = processor_ticks()
    return (used_after - used) / max(1, passed_after - passed)


class BusyMeter:
    """A meter of the share of processor time that processes other than this one and its children use.

    Args:
        processors: returns the ticks that all processors were used, and those that passed.
        own: returns the ticks that this process and those below it have used.
    """

    def __init__(
        self,
        processors: Callable[[], tuple[int, int]] | None = None,
        own: Callable[[], int] | None = None,
    ) -> None:
        self.processors = processors or processor_ticks
        self.own = own or own_ticks
        self.started_own = self.own()
        self.started = self.processors()

    def share(self) -> float:
        """Return the share since the meter was made, from 0 to 1 (Linux; elsewhere 0)."""
        used, passed = self.processors()
        own = self.own() - self.started_own
        others = used - self.started[0] - own
        return min(1.0, max(0, others) / max(1, passed - self.started[1]))


def processor_ticks() -> tuple[int, int]:
    """Return the ticks that processors were used or stolen, and those that passed (Linux; elsewhere 0)."""
    if not STAT.exists():
        return 0, 0
    ticks = [int(value) for value in STAT.read_text(encoding="utf-8").splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]  # idle and waiting for input or output
    return sum(ticks) - idle, sum(ticks)


def own_ticks(pid: int | None = None) -> int:
    """Return the ticks that a process and all below it have used, ended ones too (Linux; elsewhere 0)."""
    folder = Path(f"/proc/{os.getpid() if pid is None else pid}")
    try:
        fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        children = [child for path in folder.glob("task/*/children") for child in path.read_text().split()]
    except OSError:
        return 0  # it has ended, and its parent counts it
    times = fields[11:15]  # its own in user code and in the kernel, and those of children that have ended
    return sum(map(int, times)) + sum(own_ticks(int(child)) for child in children)
