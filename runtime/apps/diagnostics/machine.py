"""Facts about this machine from its system and nvidia-smi; a fact that they don't give is None."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...backends.requirements import read_x86_flags
from ...backends.threads import (
    ROOT,
    count_physical_cores,
    list_cgroup_folders,
    read_cgroup_limit,
    read_text,
)

# Instructions that make fp16 and int8 fast, as Linux names them.
X86_FEATURES = ("avx2", "avx512_vnni", "avx_vnni")
ARM_FEATURES = ("asimd", "fphp", "asimddp", "i8mm")

COMMAND_SECONDS = 10
COLUMNS = "index,name,compute_cap,memory.total,driver_version"
NVIDIA = "0x10de"  # a PCI device's vendor, and what its class begins with
DISPLAY = "0x03"


@dataclass(frozen=True)
class Processor:
    """The processor, and how much of it this process may use."""

    name: str
    architecture: str  # such as "x86_64" or "aarch64"
    physical_cores: int
    logical_cores: int
    cgroup_limit: float | None  # cores' worth of time; None without a limit
    features: Mapping[str, bool]  # whether it has each that matters; empty where the system doesn't say


@dataclass(frozen=True)
class Memory:
    """Bytes of main memory."""

    total: int | None
    available: int | None


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it."""

    index: int
    name: str
    sm: str | None = None  # its compute capability, such as "sm86"
    memory: int | None = None  # bytes; None where it shares the processor's
    driver: str | None = None


@dataclass(frozen=True)
class Graphics:
    """NVIDIA's GPUs and driver."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None  # the newest version that the driver has, such as "12.6"
    problem: str | None = None  # why no GPU is listed though there is one, or a driver of one


def read_processor(root: Path) -> Processor:
    """Return the processor, from /proc and /sys below `root`."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    architecture = platform.machine()
    return Processor(
        name=find_processor_name(root),
        architecture=architecture,
        physical_cores=count_physical_cores(cpus, root),
        logical_cores=len(cpus),
        cgroup_limit=read_cgroup_limit(root),
        features=read_features(architecture, root),
    )


def find_processor_name(root: Path = ROOT) -> str:
    """Return the processor's name; a Raspberry Pi gives the board's."""
    named = read_cpuinfo(root, "model name") or read_cpuinfo(root, "Model")
    return named or platform.processor() or platform.machine()


def read_features(architecture: str, root: Path) -> dict[str, bool]:
    """Return whether it has each of the instructions that matter; empty where the system doesn't say."""
    flags = read_x86_flags(architecture, root / "proc/cpuinfo")
    if flags is not None:
        return {name: name in flags for name in X86_FEATURES if flags}
    features = (read_cpuinfo(root, "Features") or "").split()
    return {name: name in features for name in ARM_FEATURES if features}


def read_cpuinfo(root: Path, key: str) -> str | None:
    """Return the value of a key in /proc/cpuinfo, for the first core."""
    match = re.search(rf"^{key}[ \t]*:(.*)$", read_text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return match[1].strip() or None if match else None


def read_memory(root: Path) -> Memory:
    """Return the main memory, from /proc/meminfo below `root`."""
    text = read_text(root / "proc/meminfo") or ""
    lines = re.findall(r"^(\w+):\s*([0-9]+) kB$", text, re.MULTILINE)
    sizes = {name: int(size) * 1024 for name, size in lines}
    return Memory(sizes.get("MemTotal"), sizes.get("MemAvailable"))


def read_free_memory(root: Path) -> int | None:
    """Return the bytes of main memory that this process may still take; None where the system doesn't say.

    Those are what the machine has available, or less in a group of processes, such as a container, that has a
    limit. What a file's cache takes of it counts as free.
    """
    rooms = [
        room
        for line in (read_text(root / "proc/self/cgroup") or "").splitlines()
        for folder in list_cgroup_folders(line, root, "memory")
        if (room := read_memory_room(folder)) is not None
    ]
    available = read_memory(root).available
    return min([*rooms, *([] if available is None else [available])], default=None)


def read_memory_room(folder: Path) -> int | None:
    """Return the bytes that the processes of one cgroup may still take; None without a limit."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most = read_text(folder / limit) or ""
        used = read_text(folder / usage) or ""
        if most.isdecimal() and used.isdecimal():
            cached = re.search(rf"^{cache} ([0-9]+)$", read_text(folder / "memory.stat") or "", re.MULTILINE)
            return max(0, int(most) - int(used) + (int(cached[1]) if cached else 0))
    return None


def find_graphics(root: Path) -> Graphics:
    """Return NVIDIA's GPUs and driver, from nvidia-smi, /proc and /sys below `root`."""
    table, problem = ask_command("nvidia-smi", f"--query-gpu={COLUMNS}", "--format=csv,noheader")
    gpus = parse_gpus(table)
    listed = (gpu.driver for gpu in gpus if gpu.driver)
    driver = next(listed, None) or parse_driver(read_text(root / "proc/driver/nvidia/version") or "")
    cuda = parse_cuda(ask_command("nvidia-smi")[0]) if gpus else None
    if not gpus and not problem:
        if driver:
            problem = f"NVIDIA's driver {driver} is loaded, but nvidia-smi lists no GPU"
        elif has_nvidia_card(root):
            problem = "there is an NVIDIA GPU, but no driver of it"
    return Graphics(gpus, driver, cuda, None if gpus else problem or None)


def read_gpu_memory(gpu: str, process: int) -> int | None:
    """Return the bytes that a process has of the GPU with this UUID; None where the driver does not say.

    In a container the driver lists no processes, or those of the host.
    """
    asked = "--query-compute-apps=pid,used_memory"
    table, _ = ask_command("nvidia-smi", asked, "--format=csv,noheader", f"--id={gpu}")
    rows = [line.partition(", ") for line in table.splitlines()]
    sizes = [parse_bytes(size.strip()) for number, _, size in rows if number.strip() == str(process)]
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def ask_command(*command: str) -> tuple[str, str]:
    """Return what a command prints, and why it failed; both empty where there is no such command."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=COMMAND_SECONDS,
        )
    except FileNotFoundError:
        return "", ""
    except subprocess.TimeoutExpired:
        return "", f"{command[0]} gave no answer in {COMMAND_SECONDS} seconds"
    except (OSError, ValueError) as error:
        return "", f"{command[0]}: {error}"
    if done.returncode:
        said = (done.stdout + done.stderr).strip() or f"exit code {done.returncode}"
        return "", f"{command[0]}: {said.splitlines()[0]}"
    return done.stdout, ""


def parse_gpus(table: str) -> tuple[Gpu, ...]:
    """Return the GPUs of nvidia-smi's table with `COLUMNS`; other lines are skipped."""
    rows = ([cell.strip() for cell in line.split(",")] for line in table.splitlines())
    return tuple(
        Gpu(int(index), ", ".join(name), parse_sm(capability), parse_bytes(size), find_version(driver))
        for index, *name, capability, size, driver in (row for row in rows if len(row) > 4)
        if re.fullmatch("[0-9]{1,4}", index)
    )


def parse_sm(capability: str) -> str | None:
    """Return the architecture of a compute capability: "sm86" of "8.6"."""
    match = re.fullmatch(r"([0-9]+)\.([0-9])", capability)
    return f"sm{int(match[1])}{match[2]}" if match else None


def parse_bytes(size: str) -> int | None:
    """Return the bytes of "24564 MiB"; None for "[N/A]"."""
    match = re.fullmatch(r"([0-9]{1,12}) MiB", size)
    return int(match[1]) * 2**20 if match else None


def find_version(text: str) -> str | None:
    """Return the first version in a text, as in "550.54.14"."""
    match = re.search(r"[0-9]+(?:\.[0-9]+)+", text)
    return match[0] if match else None


def parse_driver(text: str) -> str | None:
    """Return the driver's version from /proc/driver/nvidia/version."""
    return find_version(text.partition("Kernel Module")[2].partition("\n")[0])


def parse_cuda(header: str) -> str | None:
    """Return the version of CUDA in nvidia-smi's header; drivers from 610 on call it the UMD's."""
    match = re.search(r"CUDA (?:UMD )?Version:\s*([0-9]+\.[0-9]+)", header)
    return match[1] if match else None


def has_nvidia_card(root: Path) -> bool:
    """Tell whether a display device of NVIDIA's is on the PCI bus."""
    return any(
        read_text(device / "vendor") == NVIDIA and (read_text(device / "class") or "").startswith(DISPLAY)
        for device in root.glob("sys/bus/pci/devices/*")
    )
