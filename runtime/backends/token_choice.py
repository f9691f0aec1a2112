"""Chooses likely tokens on the GPU, by two small graphs of this package, so that few logits leave it.

N rows, K candidates, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..bundle.artifact import LIKELIEST, Artifact, TensorSpec
from .backend import Array
from .captured_step import CapturedStep
from .device_buffer import DeviceBuffer

if TYPE_CHECKING:
    from .ort_cuda_backend import OrtCudaProgram

CANDIDATES = 64  # the most of a row
GRAPHS = Path(__file__).parent / "choices"


class TokenChoice:
    """The graphs that choose from a decoder's logits, opened when they are first needed.

    Args:
        decoder: whose device they work on.
    """

    def __init__(self, decoder: OrtCudaProgram) -> None:
        self.decoder = decoder
        self.programs: dict[str, OrtCudaProgram] = {}
        self.steps: dict[str, CapturedStep] = {}

    def choose(self, logits: DeviceBuffer, names: Sequence[str]) -> dict[str, Array]:
        """Return the named results of logits (N, V): the likeliest tokens, or K candidates."""
        graph = "likeliest" if LIKELIEST[0] in names else "candidates"
        program = self.open(graph)
        step = self.steps.get(graph)
        if step is None or (step.buffers["logits"].address, step.buffers["logits"].shape) != (
            logits.address,
            logits.shape,
        ):
            step = self.steps[graph] = CapturedStep(program, {"logits": logits}, names)
        count = np.array([min(CANDIDATES, logits.shape[1])], np.int64)
        return step({} if graph == "likeliest" else {"count": count})

    def open(self, graph: str) -> OrtCudaProgram:
        if graph not in self.programs:
            device = self.decoder.device
            with device.turn():
                self.programs[graph] = type(self.decoder)(GRAPHS / f"{graph}.onnx", device)
        return self.programs[graph]

    def close(self) -> None:
        for program in self.programs.values():
            program.close()
        self.steps.clear()


def add_choices(artifact: Artifact) -> Artifact:
    """Return a decoder with outputs for each row's likeliest token, and for its candidates."""
    *rows, vocabulary = artifact.output("logits").axes
    assert isinstance(vocabulary, int)
    wider = artifact.add_candidates(min(CANDIDATES, vocabulary))
    likeliest = tuple(
        TensorSpec(name, name, dtype, (*rows, 1))
        for name, dtype in zip(LIKELIEST[:2], ("float32", "int32"), strict=True)
    )
    return replace(wider, outputs=(*wider.outputs, *likeliest))
