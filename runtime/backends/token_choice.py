"""Chooses likely tokens on the GPU, by a small graph of this package, so that few logits leave it.

N rows, K candidates, V vocabulary
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..bundle.artifact import CANDIDATES, Artifact
from ..errors import BackendError, ClosedError
from .backend import Array
from .captured_step import LOGITS, CapturedStep
from .cuda_memory import Device
from .device_buffer import DeviceBuffer

if TYPE_CHECKING:
    from .ort_cuda_backend import OrtCudaProgram

log = logging.getLogger("planforge")

MAX_CANDIDATES = 64  # the most of a row
GRAPHS = Path(__file__).parent / "choices"
CHOSEN_ON_HOST = "the graph that chooses tokens on the GPU cannot be opened, so all logits leave it: %s"


class TokenChoice:
    """The graph that chooses from a decoder's logits, opened when it is first needed.

    Args:
        device: the decoder's.
        open_program: opens a graph on a device.
    """

    def __init__(self, device: Device, open_program: Callable[[Path, Device], OrtCudaProgram]) -> None:
        self.device = device
        self.open_program = open_program
        self.step: CapturedStep | None = None
        self.on_host = False  # whether it cannot be opened

    def choose(self, logits: DeviceBuffer, wanted: Sequence[str]) -> dict[str, Array]:
        """Return the wanted ones of the candidates' results, of logits (N, V)."""
        with self.device.turn():
            step = self.step or self.open(logits)
            if step is None:
                results = choose_on_host(logits.numpy())
                return {name: results[name] for name in wanted}
            step.use({LOGITS: logits})
            results = step({"count": np.array([min(MAX_CANDIDATES, logits.shape[1])], np.int64)})
            return {name: results[name] for name in wanted}

    def open(self, logits: DeviceBuffer) -> CapturedStep | None:
        """Return the graph's step; None where it cannot be opened, which is said once."""
        if not self.on_host:
            try:
                program = self.open_program(GRAPHS / "candidates.onnx", self.device)
                self.step = CapturedStep(program, {LOGITS: logits}, CANDIDATES)
            except ClosedError:
                raise
            except BackendError as error:
                self.on_host = True
                log.warning(CHOSEN_ON_HOST, error)
        return self.step

    def close(self) -> None:
        if self.step is not None:
            self.step.program.close()
            self.step = None


def choose_on_host(logits: Array) -> dict[str, Array]:
    """Return what the graph returns for logits (N, V): K candidates, perhaps in another order."""
    count = min(MAX_CANDIDATES, logits.shape[1])
    ids = np.argpartition(logits, -count, axis=-1)[:, -count:].astype(np.int32)
    largest = logits.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # of logits that are not finite, which the sum shows
        log_sum = np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True)) + largest
    results = (np.take_along_axis(logits, ids, axis=-1), ids, log_sum)
    return dict(zip(CANDIDATES, results, strict=True))


def add_candidates(artifact: Artifact) -> Artifact:
    """Return a decoder with outputs for each row's candidates."""
    vocabulary = artifact.output(LOGITS).axes[-1]
    assert isinstance(vocabulary, int)
    return artifact.add_candidates(min(MAX_CANDIDATES, vocabulary))
