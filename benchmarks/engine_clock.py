"""The CPU time of a token outside of the engine, that of Python and numpy."""

from __future__ import annotations

import time
from typing import Any

import numpy as np


class EngineClock:
    """A clock of the calling thread's CPU time from step to step, and of the engine's part of it.

    Meaningful with one thread: the engine's own threads are not counted. What comes before the first step
    and behind the last is not counted either: the prompt's tokens, and the text of an answer that is not
    streamed, which is decoded at its end.

    Args:
        program: an `OrtProgram`, whose steps are watched from now on.
    """

    def __init__(self, program: Any) -> None:
        self.begins: list[float] = []  # the thread's seconds when a step begins
        self.seconds: list[float] = []  # of each step
        execute = program.execute

        def watched(*arguments: Any) -> None:
            begin = time.thread_time()
            execute(*arguments)
            self.begins.append(begin)
            self.seconds.append(time.thread_time() - begin)

        program.execute = watched

    def start(self) -> None:
        """Forget the steps so far."""
        self.begins.clear()
        self.seconds.clear()

    def find_medians(self) -> dict[str, float]:
        """Return the medians over all tokens, in milliseconds."""
        whole = np.diff(self.begins)
        outside = whole - self.seconds[:-1]
        return {"cpu_ms": 1e3 * float(np.median(whole)), "outside_ms": 1e3 * float(np.median(outside))}
