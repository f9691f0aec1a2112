"""The stages of a long command: a bar on a terminal, else a line each with the time that it took."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

COUNT_SECONDS = 30.0  # between two lines that say how many texts are done


class Stages:
    """Shows which stage a command is in.

    A stage's line may go on behind ": " with what changes within it, such as a case of many; a terminal
    shows all of it, a file only the stage, once, when it ends. Stages of other threads, such as a plan that
    is built beside the verification, are printed when they begin.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._thread = threading.current_thread()
        self._bar: Progress | None = None
        self._stage = ""
        self._began = time.monotonic()
        self._counted = time.monotonic()

    def __call__(self, line: str) -> None:
        """Show that a stage begins, or goes on with something else behind its ": "."""
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
        """End the last stage, and remove the bar from the terminal."""
        self.clear()
        self._say_stage()
        self._stage = ""

    def clear(self) -> None:
        """Remove the bar from the terminal until the next line."""
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def _say_stage(self) -> None:
        if self._stage and not self._console.is_terminal:
            self._print(f"{self._stage} ({time.monotonic() - self._began:.1f} s)")

    def _print(self, line: str) -> None:
        with suppress(OSError):  # a stderr that nobody reads stops no work
            self._console.print(line, markup=False)

    def _show_bar(self, line: str) -> None:
        with self._lock:
            if self._bar is None:
                columns = (
                    SpinnerColumn(),
                    TextColumn("{task.description}", markup=False),
                    BarColumn(),
                    TimeElapsedColumn(),
                )
                self._bar = Progress(*columns, console=self._console, transient=True)
                self._bar.add_task("", total=None)
                self._bar.start()
            self._bar.update(self._bar.task_ids[0], description=line)
