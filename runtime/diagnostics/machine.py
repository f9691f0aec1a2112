"""Facts about this machine from its system and nvidia-smi; a fact that they don't give is None."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..backends.requirements import x86_flags
from ..backends.threads import cgroup_limit, physical_cores, text_of

# Instructions that make fp16 and int8 fast, as Linux names them.
X86_FEATURES = ("avx2", "avx512_vnni", "avx_vnni")
ARM_FEATURES = ("asimd", "fphp", "asimddp", "i8mm")

COMMAND_SECONDS = 10
COLUMNS = "index,name,compute_cap,memory.total,driver_version"
NVIDIA = "0x10de"  # a PCI device's vendor, and what its class begins with
DISPLAY = "0x03"


@dataclass(frozen=True)
class Processor:
    """The processor, and how much of it this process may use.

    Attributes:
        architecture: such as "x86_64" or "aarch64".
        cgroup_limit: cores' worth of time; None without a limit.
        features: whether it has each of the instructions that matter; empty where the system doesn't say.
    """

    name: str
    architecture: str
    physical_cores: int
    logical_cores: int
    cgroup_limit: float | None
    features: Mapping[str, bool]


@dataclass(frozen=True)
class Memory:
    """Bytes of main memory."""

    total: int | None
    available: int | None


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it.

    Attributes:
        sm: its compute capability, such as "sm86".
        memory: bytes; None where it shares the processor's.
    """

    index: int
    name: str
    sm: str | None = None
    memory: int | None = None
    driver: str | None = None


@dataclass(frozen=True)
class Graphics:
    """NVIDIA's GPUs and driver.

    Attributes:
        cuda: the newest version of CUDA that the driver has, such as "12.6".
        problem: why no GPU is listed though there is one, or a driver of one.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    problem: str | None = None


def read_processor(root: Path) -> Processor:
    """Return the processor, from /proc and /sys below `root`."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    architecture = platform.machine()
    name = cpuinfo_line(root, "model name") or platform.processor() or architecture
    cores = physical_cores(cpus, root)
    return Processor(
        name, architecture, cores, len(cpus), cgroup_limit(root), processor_features(architecture, root)
    )


def processor_features(architecture: str, root: Path) -> dict[str, bool]:
    """Return whether it has each of the instructions that matter; empty where the system doesn't say."""
    flags = x86_flags(architecture, root / "proc/cpuinfo")
    wanted = X86_FEATURES if flags is not None else ARM_FEATURES
    found = (cpuinfo_line(root, "Features") or "").split() if flags is None else flags
    return {name: name in found for name in wanted} if found else {}


def cpuinfo_line(root: Path, key: str) -> str | None:
    """Return the value of a key in /proc/cpuinfo, for the first core."""
    found = re.search(rf"^{key}[ \t]*:(.*)$", text_of(root / "proc/cpuinfo") or "", re.MULTILINE)
    return found[1].strip() or None if found else None


def read_memory(root: Path) -> Memory:
    """Return the main memory, from /proc/meminfo below `root`."""
    text = text_of(root / "proc/meminfo") or ""
    sizes = {
        name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s*([0-9]+) kB$", text, re.MULTILINE)
    }
    return Memory(sizes.get("MemTotal"), sizes.get("MemAvailable"))


def find_graphics(root: Path) -> Graphics:
    """Return NVIDIA's GPUs and driver, from nvidia-smi, /proc and /sys below `root`."""
    table, problem = answer_of("nvidia-smi", f"--query-gpu={COLUMNS}", "--format=csv,noheader")
    gpus = parse_gpus(table)
    listed = (gpu.driver for gpu in gpus if gpu.driver)
    driver = next(listed, None) or parse_driver(text_of(root / "proc/driver/nvidia/version") or "")
    cuda = parse_cuda(answer_of("nvidia-smi")[0]) if gpus else None
    if not gpus and not problem:
        if driver:
            problem = f"NVIDIA's driver {driver} is loaded, but nvidia-smi lists no GPU"
        elif has_nvidia_card(root):
            problem = "there is an NVIDIA GPU, but no driver of it"
    return Graphics(gpus, driver, cuda, None if gpus else problem or None)


def answer_of(*command: str) -> tuple[str, str]:
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
        Gpu(int(index), ", ".join(name), sm_of(capability), bytes_of(size), version_in(driver))
        for index, *name, capability, size, driver in (row for row in rows if len(row) > 4)
        if re.fullmatch("[0-9]{1,4}", index)
    )


def sm_of(capability: str) -> str | None:
    """Return the architecture of a compute capability: "sm86" of "8.6"."""
    found = re.fullmatch(r"([0-9]+)\.([0-9])", capability)
    return f"sm{int(found[1])}{found[2]}" if found else None


def bytes_of(size: str) -> int | None:
    """Return the bytes of "24564 MiB"; None for "[N/A]"."""
    found = re.fullmatch(r"([0-9]{1,12}) MiB", size)
    return int(found[1]) * 2**20 if found else None


def version_in(text: str) -> str | None:
    """Return the first version in a text, as in "550.54.14"."""
    found = re.search(r"[0-9]+(?:\.[0-9]+)+", text)
    return found[0] if found else None


def parse_driver(text: str) -> str | None:
    """Return the driver's version from /proc/driver/nvidia/version."""
    return version_in(text.partition("Kernel Module")[2].partition("\n")[0])


def parse_cuda(header: str) -> str | None:
    """Return the version of CUDA in nvidia-smi's header; drivers from 610 on call it the UMD's."""
    found = re.search(r"CUDA (?:UMD )?Version:\s*([0-9]+\.[0-9]+)", header)
    return found[1] if found else None


def has_nvidia_card(root: Path) -> bool:
    """Tell whether a display device of NVIDIA's is on the PCI bus."""
    return any(
        text_of(device / "vendor") == NVIDIA and (text_of(device / "class") or "").startswith(DISPLAY)
        for device in root.glob("sys/bus/pci/devices/*")
    )
