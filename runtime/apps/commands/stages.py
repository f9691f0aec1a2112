"""The stages of a long command: bars on a terminal, else a line each with the time that it took."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..stage_progress import CountedLine, Notice, describe_count

COUNT_SECONDS = 30.0  # between two lines that say how much is done
SPEED_SECONDS = 3600.0  # how far back a bar looks to say how long the rest will take


class Stages:
    """Shows which stage a command is in.

    A stage's line may go on behind ": " with what changes within it, such as a case of many; a terminal
    shows all of it, and of a `CountedLine` how much is done and how long the rest will take; a file the
    stage, when it ends, and before that, each half minute, what a `CountedLine` counts. Stages of other
    threads, such as a plan that is built beside the verification, have a bar of their own, or are printed
    when they begin. A `Notice` is printed as it is.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._thread = threading.current_thread()
        self._bars: Progress | None = None
        self._rows: dict[threading.Thread, Bar] = {}
        self._stage = ""
        self._began = time.monotonic()
        self._counted = time.monotonic()
        self._pace: Pace | None = None

    def __call__(self, line: str) -> None:
        """Show that a stage begins, or goes on with something else behind its ": "."""
        if isinstance(line, Notice):
            self._print(line)
            return
        if self._console.is_terminal:
            self._show_bar(line)
        stage = line.partition(": ")[0]
        if threading.current_thread() is not self._thread:
            if not self._console.is_terminal:
                self._print(f"{line} ...")
            return
        if stage != self._stage:
            self._say_stage()
            self._stage = stage
            self._began = time.monotonic()
            self._counted = self._began
            self._pace = None
        if isinstance(line, CountedLine) and not self._console.is_terminal:
            self._say_count(line)

    def _say_count(self, line: CountedLine) -> None:
        """Print what is done of the stage and about how long the rest will take, where that was long ago."""
        if self._pace is None or self._pace.counted != name_counted(line):
            self._pace = Pace(line)
        if time.monotonic() - self._counted < COUNT_SECONDS:
            return
        self._counted = time.monotonic()
        count = describe_count(line.done, line.total, line.unit)
        left = self._pace.estimate_left(line.done)
        rest = "" if left is None else f", about {left:.0f} s left"
        what = line.removesuffix(count) if line.endswith(f": {count}") else f"{self._stage}: "
        self._print(f"{what}{count}{rest} ({self._counted - self._began:.0f} s)")

    def count(self, done: int) -> None:
        """Show how many texts are done: on a terminal at once, in a file every half minute."""
        line = f"{done:,} texts"
        if self._console.is_terminal:
            self._show_bar(line)
        elif time.monotonic() - self._counted >= COUNT_SECONDS:
            self._counted = time.monotonic()
            self._print(f"{line} ({self._counted - self._began:.0f} s)")

    def describe(self) -> str:
        """Return the unfinished stage in words, as in " while loading, after 3 s"; "" if there is none."""
        if not self._stage:
            return ""
        return f" while {self._stage}, after {time.monotonic() - self._began:.0f} s"

    def end(self) -> None:
        """End the last stage, and remove the bars from the terminal."""
        self.clear()
        self._say_stage()
        self._stage = ""

    def clear(self) -> None:
        """Remove the bars from the terminal until the next line."""
        with self._lock:
            if self._bars is not None:
                self._bars.stop()
                self._bars = None
                self._rows.clear()

    def _say_stage(self) -> None:
        if self._stage and not self._console.is_terminal:
            self._print(f"{self._stage} ({time.monotonic() - self._began:.1f} s)")

    def _print(self, line: str) -> None:
        with suppress(OSError):  # a stderr that nobody reads stops no work
            self._console.print(line, markup=False)

    def _show_bar(self, line: str) -> None:
        """Show a line, and its count, in the bar of this thread."""
        with self._lock:
            if self._bars is None:
                self._bars = Progress(
                    *make_columns(),
                    console=self._console,
                    transient=True,
                    speed_estimate_period=SPEED_SECONDS,
                )
                self._bars.start()
            for thread in [thread for thread in self._rows if not thread.is_alive()]:
                self._rows.pop(thread).remove()
            thread = threading.current_thread()
            if thread not in self._rows:
                self._rows[thread] = Bar(self._bars)
            self._rows[thread].show(line)


def name_counted(line: CountedLine) -> tuple[str, int, str]:
    """Return what a line counts: its stage, how much there is, and the unit."""
    return line.partition(": ")[0], line.total, line.unit


class Pace:
    """How fast what is counted gets done, from the first line on that counts it."""

    def __init__(self, line: CountedLine) -> None:
        self.counted = name_counted(line)
        self._first = line.done
        self._began = time.monotonic()

    def estimate_left(self, done: int) -> float | None:
        """Return about how many seconds the rest will take; None as long as nothing got done."""
        if done <= self._first:
            return None
        _, total, _ = self.counted
        return (time.monotonic() - self._began) * (total - done) / (done - self._first)


class Bar:
    """One thread's bar."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._counted: tuple[str, int | None, str] | None = None
        self._task: TaskID | None = None

    def show(self, line: str) -> None:
        """Show a line; another stage, or another thing that is counted, begins the bar anew."""
        total: int | None = None
        done = 0
        count = unit = ""
        if isinstance(line, CountedLine):
            total = line.total
            done = line.done
            unit = line.unit
            count = describe_count(done, total, unit)
        description = line.removesuffix(f": {count}")  # the count has a column of its own
        counted = (line.partition(": ")[0], total, unit)
        if counted != self._counted:
            self.remove()
            self._counted = counted
            self._task = self._bars.add_task(description, total=total, completed=done, count=count)
        assert self._task is not None
        self._bars.update(self._task, description=description, completed=done, count=count)

    def remove(self) -> None:
        """Take it off the terminal."""
        if self._task is not None:
            self._bars.remove_task(self._task)


def make_columns() -> tuple[ProgressColumn, ...]:
    """Return what a bar shows: its stage, what is done, how long that took, and how long the rest will."""
    return (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
