"""What keeps an event loop from going on: its own callbacks, and threads that hold the interpreter.

Both are told by the threads' own processor time, so that a busy machine changes nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest

BEAT = 0.005  # seconds


@dataclass
class LoopProbe:
    """The longest of what event loops had to wait for, in seconds of processor time.

    Attributes:
        callback: the longest callback, with what it was.
        thread: the longest that another thread computed while the loop's thread asked for its turn in vain.
    """

    callback: tuple[float, str] = (0.0, "")
    thread: tuple[float, str] = (0.0, "")
    _clocks: dict[int, float] = field(default_factory=dict)

    def beat(self) -> None:
        """See how much each other thread computed since this one had its last turn; not a test's own."""
        now: dict[int, float] = {}
        for thread in threading.enumerate():
            if thread.ident is None or thread in (threading.current_thread(), threading.main_thread()):
                continue
            with suppress(OSError):  # it has just ended
                now[thread.ident] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
                seconds = now[thread.ident] - self._clocks.get(thread.ident, now[thread.ident])
                self.thread = max(self.thread, (seconds, thread.name))
        self._clocks = now


@contextmanager
def probing_loops(monkeypatch: pytest.MonkeyPatch) -> Generator[LoopProbe, None, None]:
    """Measure all event loops of this process until the block ends."""
    probe = LoopProbe()
    run = asyncio.Handle._run

    def run_timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        probe.callback = max(probe.callback, (time.thread_time() - began, repr(handle)))

    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT):  # waits for the interpreter as the loop's thread does
            probe.beat()

    monkeypatch.setattr(asyncio.Handle, "_run", run_timed)
    thread = threading.Thread(target=beat, name="probe")
    thread.start()
    try:
        yield probe
    finally:
        ended.set()
        thread.join()
        monkeypatch.setattr(asyncio.Handle, "_run", run)
