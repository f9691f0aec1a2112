"""Made-up machines for the doctor: their files, their commands, and what is known of them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planforge.runtime.apps.diagnostics.doctor import Facts
from planforge.runtime.apps.diagnostics.jetson import Jetson, Power, find_jetpack
from planforge.runtime.apps.diagnostics.machine import Gpu, Graphics, Memory, Processor
from planforge.runtime.apps.diagnostics.packages import DISTRIBUTIONS, OnnxRuntime, Package

X86_CPU = "processor\t: 0\nmodel name\t: Intel(R) Core(TM) i9\nflags\t\t: fpu sse2 avx2 avx_vnni\n"
ORIN_CPU = (
    "processor\t: 0\nmodel name\t: ARMv8 Processor rev 1 (v8l)\nFeatures\t: fp asimd fphp asimdhp asimddp\n"
)
MEMINFO = "MemTotal:       16000000 kB\nMemFree:        1000000 kB\nMemAvailable:   12000000 kB\n"

RTX_4090 = "0, NVIDIA GeForce RTX 4090, 8.9, 24564 MiB, 580.95.05\n"
HEADER_580 = "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0     |\n"
# As JetPack 6.2 prints them: nvidia-smi knows neither the architecture nor the memory.
ORIN_SMI = "0, Orin (nvgpu), [N/A], [N/A], [N/A]\n"
ORIN_HEADER = "| NVIDIA-SMI 540.4.0    Driver Version: 540.4.0    CUDA Version: 12.6     |\n"
ORIN_NANO: dict[str, str] = {
    "proc/device-tree/model": "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0",
    "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005-super\0nvidia,p3767-0005\0nvidia,tegra234\0",
    "etc/nv_tegra_release": (
        "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64,"
        " DATE: Wed Jan  8 01:49:37 UTC 2025\n# KERNEL_VARIANT: oot\n"
    ),
    "etc/nvpmodel.conf": (
        "< PARAM TYPE=FILE NAME=CPU_ONLINE >\n< POWER_MODEL ID=0 NAME=15W >\nCPU_ONLINE CORE_0 1\n"
        "< POWER_MODEL ID=1 NAME=25W >\n< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n< POWER_MODEL ID=3 NAME=7W >\n"
        "< PM_CONFIG DEFAULT=1 >\n"
    ),
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq": "729600\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "1510400\n",
    "proc/cpuinfo": ORIN_CPU,
    "proc/meminfo": MEMINFO,
}


class Machine:
    """A folder with a machine's files, and the only folder with commands.

    Args:
        folder: an empty one.
        monkeypatch: of the test.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "root"
        self.commands = folder / "bin"
        self.root.mkdir()
        self.commands.mkdir()
        monkeypatch.setenv("PATH", str(self.commands))

    def files(self, texts: Mapping[str, str]) -> Machine:
        for name, text in texts.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return self

    def command(self, name: str, script: str) -> Machine:
        path = self.commands / name
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
        return self

    def prints(self, name: str, text: str) -> Machine:
        return self.command(name, f"printf %s {shlex.quote(text)}")

    def nvidia_smi(self, table: str, header: str) -> Machine:
        """One that answers the doctor's query with the table, and no arguments with the header."""
        asked = "--query-gpu=index,name,compute_cap,memory.total,driver_version"
        return self.command(
            "nvidia-smi",
            f'case "$1" in {asked}) printf %s {shlex.quote(table)};; "") printf %s {shlex.quote(header)};;'
            " *) exit 2;; esac",
        )


def facts(
    *sms: str | None,
    cuda: str | None = "13.0",
    architecture: str = "x86_64",
    packages: Mapping[str, str] | None = None,
    providers: tuple[str, ...] = ("CPUExecutionProvider",),
    ort_cuda: str | None = None,
    release: str | None = None,
    **changes: Any,
) -> Facts:
    """A machine with GPUs of these architectures.

    Args:
        packages: the versions of those that are installed.
        ort_cuda: what ONNX Runtime was made for.
        release: of Jetson Linux.
    """
    versions = {"onnxruntime": "1.31.1"} if packages is None else packages
    gpus = tuple(Gpu(index, f"GPU {index}", sm) for index, sm in enumerate(sms))
    board = Jetson("NVIDIA Jetson", release, find_jetpack(release), sms[0] if sms else None, FULL_SPEED)
    known: dict[str, Any] = {
        "planforge": "0.1.0",
        "python": "3.10.12",
        "system": "Linux 6",
        "libc": "glibc 2.35",
        "processor": Processor("A processor", architecture, 4, 8, None, {}),
        "memory": Memory(None, None),
        "graphics": Graphics(gpus, None, cuda if gpus else None),
        "jetson": board if release else None,
        "packages": tuple(
            Package(module, {name: versions[name] for name in names if name in versions})
            for module, names in DISTRIBUTIONS.items()
        ),
        "onnxruntime": OnnxRuntime(providers, ort_cuda),
    }
    return Facts(**{**known, **changes})


FULL_SPEED = Power("MAXN", 0, 0, True)


@dataclass
class Driver:
    """libcuda as far as the builder asks it, as an Orin with JetPack 6.2 unless told otherwise."""

    sm: str = "sm87"
    cuda: int = 12060
    status: int = 0  # of cuInit

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.status

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:  # noqa: N802
        major, minor = divmod(int(self.sm[2:]), 10)
        value._obj.value = {75: major, 76: minor}[attribute]
        return 0

    def cuDriverGetVersion(self, value: Any) -> int:  # noqa: N802
        value._obj.value = self.cuda
        return 0
