"""A generator whose engine stops before each step until it may go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from planforge.runtime import TextGenerator

from .generation import Steps, generator
from .patience import PATIENCE


class Gate:
    """Stops the engine before each step until it may go on."""

    def __init__(self, steps: Steps) -> None:
        self.graph = steps.graph
        self.entered = threading.Semaphore(0)
        self.passes = threading.Semaphore(0)
        self.is_open = False
        steps.graph = self

    def __call__(self, given: Any) -> Any:
        self.entered.release()
        if not self.is_open:
            assert self.passes.acquire(timeout=PATIENCE)
        return self.graph(given)

    def wait(self) -> None:
        """Wait until the engine is at a step."""
        assert self.entered.acquire(timeout=PATIENCE)

    def step(self, count: int = 1) -> None:
        """Let it go to the next steps."""
        for _ in range(count):
            self.passes.release()
            self.wait()

    def open(self) -> None:
        self.is_open = True
        self.passes.release()


@contextmanager
def gated(**options: Any) -> Iterator[tuple[TextGenerator, Gate]]:
    model, steps = generator("inplace")
    model.schedule(**options)
    gate = Gate(steps)
    try:
        yield model, gate
    finally:
        gate.open()
        model.close()
