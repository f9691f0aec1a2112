"""What a graph's operators need of ONNX Runtime and of the processor."""

from __future__ import annotations

import functools
import logging
import platform
from pathlib import Path

from ..bundle.manifest import Artifact
from ..errors import BackendUnavailableError

log = logging.getLogger("planforge")

# The first versions whose CPU provider ran such graphs, of all from 1.20 to 1.31.
WHOLE_NUMBERS = (1, 23)
WHOLE_NUMBER_CACHE = (1, 27)
CPUINFO = Path("/proc/cpuinfo")
VNNI = {"avx512_vnni", "avx_vnni"}
# Exact kernels instead of fast ones, on a processor with VNNI too, where int8 would take twice as long.
# Source: https://github.com/microsoft/onnxruntime/pull/12088
EXACT_PRODUCTS = {"session.x64quantprecision": "1"}


def check_version(artifact: Artifact, installed: str) -> None:
    """Refuses a graph that an older ONNX Runtime would not open, or answer with an error at its first step.

    Raises:
        BackendUnavailableError: names the version that is needed, and the command that installs it.
    """
    chosen = artifact.quantization
    needed = WHOLE_NUMBER_CACHE if "cache_bits" in chosen else WHOLE_NUMBERS if chosen else (0,)
    found = tuple(int(part) for part in installed.split(".")[:2] if part.isdecimal())
    if found and found < needed:
        version = ".".join(map(str, needed))
        raise BackendUnavailableError(
            f"{artifact.id} needs ONNX Runtime {version} or newer, installed is {installed}: pip install"
            f" 'onnxruntime>={version}', or load another precision"
        )


def say_if_slow(artifact: Artifact, machine: str = platform.machine(), cpuinfo: Path = CPUINFO) -> None:
    """Warns where whole numbers run without vector instructions: right, but slower than fp32 may be."""
    flags = x86_flags(machine, cpuinfo)
    if artifact.quantization.get("bits") and flags and "avx2" not in flags:
        log.warning(
            "this processor has no AVX2, so ONNX Runtime multiplies %s in its plain loops; compare it with"
            " precision='fp32' by `planforge bench`",
            artifact.id,
        )


def products_saturate(machine: str = platform.machine(), cpuinfo: Path = CPUINFO) -> bool:
    """Whether sums of uint8 * int8 products may be wrong unless `EXACT_PRODUCTS` is set.

    So it is on x86 without VNNI, which adds pairs of them in 16 bits; it may be where the system doesn't say.
    """
    flags = x86_flags(machine, cpuinfo)
    return flags is not None and not VNNI & flags


@functools.cache  # every graph that is opened asks
def x86_flags(machine: str, cpuinfo: Path) -> frozenset[str] | None:
    """What an x86 processor can do, as Linux names it; empty where it is not said, None of others."""
    if machine not in ("x86_64", "AMD64"):
        return None
    if not cpuinfo.exists():
        return frozenset()
    with cpuinfo.open(encoding="utf-8", errors="replace") as lines:  # of the first core alone
        return frozenset(next((line.split(":")[1].split() for line in lines if line.startswith("flags")), []))
