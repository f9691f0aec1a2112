"""Signals that end this process: they wait while it must not end, and report whether a bundle has changed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

# Signals that ask a process to end: docker stop and CI send the first, a terminal that closes the second.
# Windows has only the first.
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_changes: list[str] = []  # what this process has changed, in words
received: list[KeyboardInterrupt] = []  # what signals have raised in this command, the last at the end


class Terminated(KeyboardInterrupt):
    """A signal asked this process to end; like Ctrl-C it unwinds, so that everything is cleaned up."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Hold back signals that would end this process while the block, a short one, runs."""
    waiting: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    handled = {number: handler for number, handler in before.items() if callable(handler)}
    for number in handled:
        signal.signal(number, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        for number in waiting[:1]:
            signal.raise_signal(number)


@contextlib.contextmanager
def commit_change() -> Iterator[None]:
    """Hold back signals while the block changes a bundle, and note that it has."""
    with hold_signals():
        yield
        note_changes("the bundle was written already")


def note_changes(words: str) -> None:
    """Say what an interrupted command will have changed from now on."""
    _changes[:] = [words]


def describe_changes() -> str:
    """Return what an interrupted command has changed, in words."""
    return _changes[0] if _changes else "nothing was changed"


def forget_changes() -> None:
    """Count as changed what is committed from now on."""
    _changes.clear()
