"""What a graph's operators need of ONNX Runtime and of the processor."""

from __future__ import annotations

import functools
import logging
import platform
from pathlib import Path

from ..bundle.manifest import Artifact
from ..errors import BackendUnavailableError

log = logging.getLogger("planforge")

# The first versions whose CPU provider ran such graphs, of all from 1.20 to 1.31; a GPU's was tried in 1.31.
QUANTIZED_WEIGHTS = (1, 23)
QUANTIZED_CACHE = (1, 27)
QUANTIZED_CACHE_IN_HALF = (1, 29)
CPUINFO = Path("/proc/cpuinfo")
VNNI = {"avx512_vnni", "avx_vnni"}
# Exact kernels instead of fast ones, on a processor with VNNI too, where int8 would take twice as long.
# Source: https://github.com/microsoft/onnxruntime/pull/12088
EXACT_PRODUCTS = {"session.x64quantprecision": "1"}


def check_version(artifact: Artifact, installed: str) -> None:
    """Refuse a graph that the installed ONNX Runtime is too old to open or to run."""
    if not artifact.quantization:
        return
    needed = QUANTIZED_WEIGHTS
    if "cache_bits" in artifact.quantization:
        needed = QUANTIZED_CACHE_IN_HALF if artifact.is_half else QUANTIZED_CACHE
    present = tuple(int(part) for part in installed.split(".")[:2] if part.isdecimal())
    if present and present < needed:
        version = ".".join(map(str, needed))
        raise BackendUnavailableError(
            f"{artifact.id} needs ONNX Runtime {version} or newer, installed is {installed}: pip install"
            f" 'onnxruntime>={version}', or load another precision"
        )


def warn_if_slow(artifact: Artifact, machine: str = platform.machine(), cpuinfo: Path = CPUINFO) -> None:
    """Warn where quantized weights run without vector instructions: right, but perhaps slower than fp32."""
    flags = read_x86_flags(machine, cpuinfo)
    if artifact.quantization.get("bits") and flags and "avx2" not in flags:
        log.warning(
            "this processor has no AVX2, so ONNX Runtime multiplies %s in its plain loops; compare it with"
            " precision='fp32' by `planforge bench`",
            artifact.id,
        )


def products_saturate(machine: str = platform.machine(), cpuinfo: Path = CPUINFO) -> bool:
    """Tell whether sums of uint8 * int8 products may be wrong unless `EXACT_PRODUCTS` is set."""
    flags = read_x86_flags(machine, cpuinfo)
    return flags is not None and not VNNI & flags  # x86 without VNNI adds pairs of them in 16 bits


@functools.cache  # called for every graph that is opened
def read_x86_flags(machine: str, cpuinfo: Path) -> frozenset[str] | None:
    """Return an x86 processor's features as Linux names them; empty if unknown, None for other processors."""
    if machine not in ("x86_64", "AMD64"):
        return None
    if not cpuinfo.exists():
        return frozenset()
    with cpuinfo.open(encoding="utf-8", errors="replace") as lines:  # of the first core alone
        return frozenset(next((line.split(":")[1].split() for line in lines if line.startswith("flags")), []))
