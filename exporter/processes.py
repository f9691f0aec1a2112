"""Child processes that run this package's own modules, and end with this process."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

from ..runtime.apps.signals import ENDING, Terminated, received

T = TypeVar("T")

_children: set[subprocess.Popen[str]] = set()
_children_lock = threading.RLock()  # whichever thread starts a child; a signal may come meanwhile
_group: ContextVar[ChildGroup | None] = ContextVar("group", default=None)
_ending = threading.Event()  # a signal came: what starts now is killed at once


def make_command(module: str) -> list[str]:
    """Return the command that calls `module`.main with the arguments that follow.

    Python puts the current folder first on its path for -m and -c alike, where a stray random.py would be
    imported, and run, instead of the real one; so it is taken off before anything is imported.
    """
    code = (
        f"import sys; sys.path[:] = [p for p in sys.path if p]; from {module} import main; main(sys.argv[1:])"
    )
    return [sys.executable, "-c", code]


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a process that ends when this one is told to end; the options are subprocess.Popen's."""
    child: subprocess.Popen[str] = subprocess.Popen(command, **options)
    with _children_lock:
        _children.difference_update([one for one in _children if one.returncode is not None])
        _children.add(child)
    if (group := _group.get()) is not None:
        group.add(child)
    if _ending.is_set():
        child.kill()
    return child


def run_child(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a process to its end, as subprocess.run does, and end it when this one is told to end."""
    with start_child(command, **options) as child:
        try:
            output, errors = child.communicate()
        except BaseException:
            child.kill()
            raise
    return subprocess.CompletedProcess(child.args, child.returncode, output, errors)


def kill_running(children: Iterable[subprocess.Popen[str]]) -> None:
    """Kill the children that still run, whichever thread waits for them."""
    with _children_lock:
        running = list(children)
    for child in running:
        if child.returncode is None:
            with contextlib.suppress(OSError):
                child.kill()


@contextlib.contextmanager
def end_children_on_signals() -> Iterator[None]:
    """Make SIGTERM and Ctrl-C kill the children and unwind the main thread, inside the block.

    A thread that waits for a child gets it back at once, so that nobody waits for a plan of many minutes.
    While the thread unwinds, further signals don't disturb it. Python drops an exception that is raised in
    some callbacks, such as those of its import system: the next signal then raises again. Signals that
    are ignored (nohup) stay so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change what signals do
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        _ending.set()
        kill_running(_children)
        if is_handling(received):
            return
        received.append(KeyboardInterrupt() if number == signal.SIGINT else Terminated(number))
        raise received[-1]

    for number, handler in before.items():
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end)
    try:
        yield
    finally:
        _ending.clear()
        received.clear()
        for number, handler in before.items():
            if handler is not None:  # None: set by no Python code, so Python cannot set it again
                signal.signal(number, handler)


def is_handling(errors: Sequence[BaseException]) -> bool:
    """Tell whether one of these errors unwinds this thread, which is in an `except`, `finally` or `with`."""
    current = sys.exc_info()[1]
    while current is not None:
        if any(current is error for error in errors):
            return True
        current = current.__context__
    return False


@contextlib.contextmanager
def leave_cores(children: int) -> Iterator[None]:
    """Make PyTorch leave a core to each of so many busy children, inside the block.

    Its threads spin while they wait for one another, which they do at every product: on two cores, with two
    children at work, that took 16.6 seconds of processor time instead of 7.1.
    """
    if not children:  # nor is PyTorch needed
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - children))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class ChildGroup:
    """The child processes that one piece of work starts, while this process does other things."""

    def __init__(self) -> None:
        self.stopped = False  # the work is to end; what it starts from now on is killed at once
        self._members: list[subprocess.Popen[str]] = []

    def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call `work`; the children that it starts, in this thread, belong to the group."""
        token = _group.set(self)
        try:
            return work(*arguments)
        finally:
            _group.reset(token)

    def add(self, child: subprocess.Popen[str]) -> None:
        """Add a child process to the group; called by `start_child`."""
        with _children_lock:
            self._members.append(child)
        if self.stopped:
            child.kill()

    def stop(self) -> None:
        """Kill every child that still runs; the code that waits for a child reaps it."""
        self.stopped = True
        kill_running(self._members)
