"""How many threads an engine gets: the physical cores that the process may use, within its cgroup's limit."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class Threads:
    """A number of threads, and why so many."""

    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} thread{'' if self.count == 1 else 's'}: {self.reason}"


def choose_threads(
    wanted: int | None = None,
    environment: Mapping[str, str] | None = None,
    cpus: Collection[int] | None = None,
    root: Path = ROOT,
) -> Threads:
    """Return `wanted`, else OMP_NUM_THREADS, else one thread per physical core, within the cgroup's limit.

    Two threads of one core share its arithmetic units, so a second one slows matrix products down. A cgroup's
    limit of 1.5 cores gives 2 threads: one alone would leave a third of it unused.
    """
    environment = os.environ if environment is None else environment
    if wanted is not None:
        return Threads(wanted, "as asked for")
    if cpus is None:
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    omp = environment.get("OMP_NUM_THREADS", "").strip()
    if omp.isdecimal() and int(omp) > 0:
        present = os.cpu_count() or 1
        capped = "" if int(omp) <= present else f", of which this machine has {present}"
        return Threads(min(int(omp), present), f"OMP_NUM_THREADS={omp}{capped}")
    ignored = f", OMP_NUM_THREADS={omp!r} is no number of threads" if omp else ""
    cores = count_physical_cores(cpus, root)
    limit = read_cgroup_limit(root)
    count = cores if limit is None else max(1, min(cores, math.ceil(limit)))
    limited = "" if limit is None else f", cgroup limit {limit:g}"
    plural = "" if cores == 1 else "s"
    return Threads(count, f"{cores} physical core{plural} of {len(cpus)} logical{limited}{ignored}")


def count_physical_cores(cpus: Collection[int], root: Path = ROOT) -> int:
    """Return the number of physical cores of these logical processors, at least 1."""
    cores = {find_core(cpu, root) for cpu in cpus}
    if None not in cores:
        return max(1, len(cores))
    pairs = platform.machine().lower() in ("x86_64", "amd64")  # as a rule, where Linux does not say
    return max(1, (len(cpus) + 1) // 2 if pairs else len(cpus))


def find_core(cpu: int, root: Path) -> str | None:
    """Return a name of the core that a logical processor is part of."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    if siblings := read_text(folder / "thread_siblings_list"):
        return siblings  # such as "0,4" or "0-1": the same for both
    package, core = (read_text(folder / name) for name in ("physical_package_id", "core_id"))
    return f"{package}/{core}" if core else None


def read_cgroup_limit(root: Path = ROOT) -> float | None:
    """Return the process's lowest CPU limit of all its cgroups, in cores; None without a limit."""
    limits = [
        limit
        for line in (read_text(root / "proc/self/cgroup") or "").splitlines()
        for folder in list_cgroup_folders(line, root)
        if (limit := read_quota(folder)) is not None
    ]
    return min(limits, default=None)


def list_cgroup_folders(line: str, root: Path, controller: str = "cpu") -> Iterator[Path]:
    """Yield the folders that one line of /proc/self/cgroup stands for, from the group up to the mount.

    A line is number:controllers:path. A container may see its own group as the mount itself, under a path
    that is the host's.
    """
    _, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    mounts = [f"sys/fs/cgroup/{name}" for name in (controllers, controller, f"{controller},cpuacct")]
    if not controllers:  # version 2, alone or beside version 1
        mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
    elif controller not in controllers.split(","):
        return
    names = [name for name in path.split("/") if name not in ("", "..")]
    for mount in mounts:
        for depth in range(len(names), -1, -1):
            yield root.joinpath(mount, *names[:depth])


def read_quota(folder: Path) -> float | None:
    """Return the CPU limit of one cgroup, in cores; None without one."""
    allowed, _, period = (read_text(folder / "cpu.max") or "").partition(" ")
    if not allowed:
        allowed = read_text(folder / "cpu.cfs_quota_us") or ""
        period = read_text(folder / "cpu.cfs_period_us") or ""
    if not (allowed.isdecimal() and period.isdecimal() and int(allowed) and int(period)):
        return None  # "max", -1, or no such file
    return int(allowed) / int(period)


def read_text(path: Path) -> str | None:
    """Return a small file's text; None where it cannot be read or is empty."""
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):  # no such file, no text, or a name that no file can have
        return None
