"""How tests wait for what is to come, and clocks that they turn: no verdict hangs on a machine's speed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from planforge.runtime.memory_budget import MemoryBudget, Reservation

PATIENCE = 120.0  # seconds; what takes milliseconds takes so long on no machine, however busy


def wait_until(holds: Callable[[], bool], what: str = "") -> None:
    """Wait until a condition holds; fail where it never does."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, what or "it never came to that"
        time.sleep(0.005)


class MemoryWaits:
    """Tells whether a call waits for another's memory: it has looked in vain before and after a wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks: Counter[object] = Counter()
        add = MemoryBudget._add

        def add_and_count(budget: MemoryBudget, asked: Reservation) -> bool:
            has_room = add(budget, asked)
            self.looks[asked] += not has_room
            return has_room

        monkeypatch.setattr(MemoryBudget, "_add", add_and_count)

    def wait(self) -> None:
        """Wait until one has waited."""
        wait_until(lambda: max(self.looks.values(), default=0) >= 3)


class Clock:
    """The module `time` as others see it, which a test turns forward.

    Attributes:
        ahead: seconds.
    """

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def turn_clocks(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Clock:
    """Give these modules a clock that the test turns: they say `time.monotonic()`."""
    clock = Clock()
    for module in modules:
        monkeypatch.setattr(module, "time", clock)
    return clock
