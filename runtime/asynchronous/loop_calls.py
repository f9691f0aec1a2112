"""Calls from other threads into an event loop, which wakes up once for all that came meanwhile."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable


class LoopCalls:
    """Runs functions in the thread of an event loop, in the order in which other threads gave them.

    Waking a loop costs a system call, and an engine's step has news for many requests.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # which keeps this object, see `get_loop_calls`
        self._functions: deque[Callable[[], object]] = deque()
        self._woken = False

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the loop's thread, unless the loop has ended: then nobody waits."""
        self._functions.append(function)  # before the look at `_woken`, so that `_run` finds it
        loop = self._loop()
        if self._woken or loop is None:
            return
        self._woken = True
        try:
            loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            if not loop.is_closed():
                raise
            self._functions.clear()

    def _run(self) -> None:
        self._woken = False  # first, so that what comes from here on wakes the loop again
        try:
            while self._functions:
                self._functions.popleft()()
        finally:
            if self._functions:  # one raised, which asyncio reports; the others are not to blame
                asyncio.get_running_loop().call_soon(self._run)


_calls: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopCalls] = weakref.WeakKeyDictionary()


def get_loop_calls() -> LoopCalls:
    """Return the calls into the event loop that runs in this thread."""
    loop = asyncio.get_running_loop()
    calls = _calls.get(loop)
    if calls is None:
        calls = _calls[loop] = LoopCalls(loop)
    return calls
