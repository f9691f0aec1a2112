"""Measures the GPU itself: bytes copied, fp16 operations of a product, and its clocks meanwhile.

python -m benchmarks.gpu.bounds prints JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from .nvidia import CLOCKS, query

TRIES = 5
REPEATS = 10
MOST = 5000
LARGEST = 2**32  # bytes of a block: more than any cache holds
SIDE = 8192  # of the matrices


def bounds(device: str = "cuda", largest: int = LARGEST, side: int = SIDE) -> dict[str, Any]:
    """Return the best of some tries.

    Args:
        device: of torch.
        largest: bytes of the block that is copied, or an eighth of what is free.
        side: of the square matrices.

    Returns:
        "copy_gb_per_s", bytes read and bytes written together; "fp16_tflops"; "clocks" under that load.
    """
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    copied = copy_rate(device, largest, wait)
    a, b = (torch.randn(side, side, dtype=torch.float16, device=device) for _ in range(2))
    product = seconds(lambda: a @ b, wait)
    for _ in range(min(MOST, int(1 / product))):  # a second of work, in which nvidia-smi looks at the clocks
        a @ b
    clocks = query(CLOCKS)
    wait()
    return {
        "copy_gb_per_s": round(copied / 1e9, 1),
        "fp16_tflops": round(2 * side**3 / product / 1e12, 3),
        "clocks": clocks,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
    }


def copy_rate(device: str, largest: int, wait: Callable[[], None]) -> float:
    """Return the bytes per second, read and written."""
    import torch

    size = min(largest, torch.cuda.mem_get_info()[0] // 8) if device == "cuda" else largest
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), wait)


def seconds(work: Callable[[], Any], wait: Callable[[], None]) -> float:
    """Return the seconds of one piece of work, of several started at once: the best try after a warm-up."""
    best = float("inf")
    for _ in range(1 + TRIES):
        wait()
        started = time.perf_counter()
        for _ in range(REPEATS):
            work()
        wait()
        best = min(best, (time.perf_counter() - started) / REPEATS)
    return best


if __name__ == "__main__":
    try:
        print(json.dumps(bounds()))
    except (ImportError, AssertionError, RuntimeError) as error:  # what torch raises where it has no CUDA
        sys.exit(f"PyTorch cannot use the GPU: {str(error).partition(chr(10))[0]}")
