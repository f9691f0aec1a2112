"""The process that `prove` measures, in which plans run on an emulated GPU, the third of its machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planforge.runtime.apps.diagnostics.child import serve_parent
from planforge.runtime.apps.proof.worker import Work, serve

from .emulated_gpu import emulated_gpu

GPUS: dict[str, Any] = {"first": 1, "count": 2}  # as with CUDA_VISIBLE_DEVICES=1,2
UUID = "GPU-02020202-0202-0202-0202-020202020202"  # of the second of these


def serve_emulated(work: dict[str, Any]) -> None:
    with emulated_gpu(Path(work["bundle"]), **GPUS):
        serve(Work(**work))


def main() -> None:
    serve_parent(serve_emulated)
