from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from benchmarks.engine_clock import EngineClock


class Engine:
    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def execute(self, *arguments: str) -> None:
        self.calls.append(arguments)


def test_what_passes_between_steps_is_outside_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    # Begin and end of each step, in seconds of the thread.
    seconds: Iterator[float] = iter([0.0, 9.0, 1.0, 1.5, 1.75, 2.5, 2.75, 3.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(seconds))
    engine = Engine()
    clock = EngineClock(engine)
    engine.execute("of an earlier run")
    clock.start()
    for _ in range(3):
        engine.execute("session", "binding")
    assert engine.calls == [("of an earlier run",), *[("session", "binding")] * 3]
    # From step to step 0.75 and 1.0 seconds, of them 0.5 and 0.75 in the engine.
    assert clock.find_medians() == {"cpu_ms": 875.0, "outside_ms": 250.0}
