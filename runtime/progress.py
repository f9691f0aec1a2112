"""Reports how far work is, to a callable or to a person: texts that are finished, and parts of a stage.

What takes long calls a `progress` of its caller's with a line of text when a stage begins, and as it goes on.
Such a line may be a `CountedLine` or a `Notice`, which are strings that know more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from .errors import InputError

if TYPE_CHECKING:
    from .options import ProgressOption

SECONDS_BETWEEN_LINES = 10.0  # where stderr is no terminal: a log file needs no line for each batch
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


class Progress:
    """Reports the number of finished texts; a context manager that ends the line on stderr.

    The option is the caller's `progress=`: False reports nothing, True counts on stderr, a callable gets the
    number of finished texts each time that it has grown.
    """

    def __init__(self, option: ProgressOption, unit: str = "texts") -> None:
        if not isinstance(option, bool) and not callable(option):
            raise InputError(
                f"progress={option!r:.80} must be True, which counts on stderr, False, or a callable that"
                " gets the number of finished texts"
            )
        self._report: Callable[[int], None] | None = None if isinstance(option, bool) else option
        self._on_stderr = option is True
        self._unit = unit
        self._done = 0
        self._shown = 0
        self._shown_at = time.monotonic()

    def __call__(self, done: int) -> None:
        """Report that `done` texts are finished, if that is news."""
        if done <= self._done:
            return
        self._done = done
        if self._report is not None:
            self._report(done)
        elif self._on_stderr and sys.stderr.isatty():
            print(f"\r{self._done} {self._unit}", end="", file=sys.stderr, flush=True)
            self._shown = self._done
        elif self._on_stderr and time.monotonic() - self._shown_at >= SECONDS_BETWEEN_LINES:
            self._write_line()

    def _write_line(self) -> None:
        print(f"{self._done} {self._unit}", file=sys.stderr, flush=True)
        self._shown = self._done
        self._shown_at = time.monotonic()

    def close(self) -> None:
        """End the line on stderr, or write the last number where stderr is no terminal."""
        if not self._on_stderr or not self._done:
            return
        if sys.stderr.isatty():
            print(file=sys.stderr, flush=True)
        elif self._shown < self._done:
            self._write_line()
        self._on_stderr = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
