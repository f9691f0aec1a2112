"""Memory that is given back seldom: looking for what is free takes a tenth of verifying a tiny model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest

from planforge.exporter.memory import give_back_mapped_pages, give_back_memory

EVERY = 20  # calls, of which the first gives memory back
STAGES = ("calibration.calibration", "exporting", "verification.verdict", "verification.verify")


@contextmanager
def give_memory_back_seldom() -> Iterator[None]:
    """Let verification and export give memory back between some of their stages, not between all.

    Tests of what they hold in memory do so in child processes, or call what gives it back themselves.
    """
    with pytest.MonkeyPatch.context() as patch:
        for stage in STAGES:
            patch.setattr(
                import_module(f"planforge.exporter.{stage}"), "give_back_memory", seldom(give_back_memory)
            )
        reading = import_module("planforge.exporter.verification.reading")
        patch.setattr(reading, "give_back_mapped_pages", seldom(give_back_mapped_pages))
        yield


def seldom(work: Callable[[], None]) -> Callable[[], None]:
    """Return what does some work at the first of every few calls."""
    calls = itertools.count()

    def work_seldom() -> None:
        if next(calls) % EVERY == 0:
            work()

    return work_seldom
