"""How far a stage of a command is: lines of text that know how much is done.

What takes long calls a `progress` of its caller's with a line when a stage begins, and as it goes on.
Such a line may be a `CountedLine` or a `Notice`, which are strings that know more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

SECONDS_BETWEEN_COUNTS = 0.25  # that a stage tells: nobody reads more
BYTES = "bytes"  # the unit that is written as MB


class Notice(str):
    """A line for the user that is no stage: what is to be known before work begins."""

    __slots__ = ()


class CountedLine(str):
    """A line of a stage that also has, as numbers, how much of the stage is done.

    Attributes:
        done: how much is done.
        total: how much there is.
        unit: what is counted, in the plural, such as "graphs"; or `BYTES`.
    """

    done: int
    total: int
    unit: str

    def __new__(cls, line: str, done: int, total: int, unit: str) -> CountedLine:
        """Return `line` with its numbers."""
        made = super().__new__(cls, line)
        made.done = done
        made.total = total
        made.unit = unit
        return made


def describe_count(done: int, total: int, unit: str) -> str:
    """Return the numbers of a `CountedLine` in words, such as "3 of 7 graphs"."""
    if unit == BYTES:
        return f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
    return f"{done:,} of {total:,} {unit}"


class StageCounter:
    """Tells a `progress` how much of one stage is done: its beginning, its end, and now and then between.

    Args:
        progress: what takes the lines.
        stage: how they begin; ": " and the count follow.
        unit: what is counted, as of a `CountedLine`.
    """

    def __init__(self, progress: Callable[[str], None], stage: str, unit: str) -> None:
        self._progress = progress
        self._stage = stage
        self._unit = unit
        self._told_at = -SECONDS_BETWEEN_COUNTS

    def __call__(self, done: int, total: int) -> None:
        """Tell that so much of `total` is done."""
        now = time.monotonic()
        if 0 < done < total and now - self._told_at < SECONDS_BETWEEN_COUNTS:
            return
        self._told_at = now
        count = describe_count(done, total, self._unit)
        self._progress(CountedLine(f"{self._stage}: {count}", done, total, self._unit))


Report: TypeAlias = Callable[[int, int], None]  # takes how much is done, and how much there is


class PartCounter:
    """Counts the parts of a stage, of which there are `total`, as they get done."""

    def __init__(self, report: Report, total: int) -> None:
        self._report = report
        self._total = total
        self._done = 0
        report(0, total)

    def finish_one(self) -> None:
        """Report that one more is done."""
        self._done += 1
        self._report(self._done, self._total)


def report_nothing(done: int, total: int) -> None:
    """Take a report, and do nothing."""
