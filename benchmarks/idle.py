"""Keeps measurements on a machine that was busy with other things from counting as results."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .machine import BUSY, busy_share

ATTEMPTS = 3
PATIENCE = 120.0  # seconds to wait before each attempt for a machine with nothing else to do


class BusyMachineError(Exception):
    """The machine was busy at every attempt, so no result exists."""


def measure_when_idle(
    measure: Callable[[], dict[str, Any]],
    *,
    say: Callable[[str], None],
    busy_now: Callable[[], float] = lambda: busy_share(1.0),
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Measure while the machine has nothing else to do; again, a few times, where it had.

    Args:
        measure: returns a result that says in ["machine"]["busy"] what share of the processors' time others
            used meanwhile.
        say: called with a line when something is measured again, or is not measured.
        busy_now: takes some time, and returns the share that was used meanwhile.
        clock: seconds.

    Returns:
        The first result whose share is at most `BUSY`.

    Raises:
        BusyMachineError: there was none in `ATTEMPTS`.
    """
    shares = []
    for attempt in range(1, ATTEMPTS + 1):
        waiting = wait_until_idle(busy_now, clock)
        if waiting > BUSY:
            shares.append(waiting)
            say(f"attempt {attempt}: {waiting:.0%} busy with other things for {PATIENCE:.0f} s: not measured")
            continue
        result = measure()
        busy = result["machine"]["busy"]
        if busy <= BUSY:
            return result
        shares.append(busy)
        say(f"attempt {attempt}: {busy:.0%} busy with other things meanwhile: not counted")
    listed = ", ".join(f"{share:.0%}" for share in shares)
    raise BusyMachineError(f"the machine was busy with other things at every attempt ({listed})")


def wait_until_idle(busy_now: Callable[[], float], clock: Callable[[], float]) -> float:
    """Wait for a machine with nothing else to do, `PATIENCE` at most; return how busy it was at last."""
    started = clock()
    while True:
        busy = busy_now()
        if busy <= BUSY or clock() - started >= PATIENCE:
            return busy
