"""Counts finished texts for a callable, or on stderr for a person."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .errors import InputError

if TYPE_CHECKING:
    from .options import ProgressOption

SECONDS_BETWEEN_LINES = 10.0  # where stderr is no terminal: a log file needs no line for each batch


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
