"""The one thread that runs an engine for the requests of many callers; policies say what a turn does."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from ..decoding.checks import check_positive
from ..errors import ClosedError, DeadlineError
from .options import Observer, observe_nothing
from .queue import FairQueue

log = logging.getLogger("planforge")


class Request(Protocol):
    """What a caller waits for."""

    @property
    def is_wanted(self) -> bool:
        """Whether it was not cancelled, and its deadline has not passed."""


Q = TypeVar("Q", bound=Request)


class EngineThread(ABC, Generic[Q]):
    """Takes requests from a queue, turn by turn. Close it, which ends those that wait.

    The thread starts with the first request, and ends when the engine is closed or a turn raises an error:
    then every request fails with it.

    Args:
        name: of the thread.
        queue: the requests that wait. Whoever reads or changes it holds `changed`.
        observer: gets measures, until it raises.
    """

    def __init__(self, name: str, queue: FairQueue[Q], observer: Observer) -> None:
        self.name = name
        self.observer = observer
        self.waiting = queue
        self.changed = threading.Condition()
        self.closed = False
        self.thread: threading.Thread | None = None

    @abstractmethod
    def run_turn(self) -> None:
        """Work on the requests that wait or run, and return soon: the others wait meanwhile."""

    @abstractmethod
    def list_running(self) -> list[Q]:
        """Return the requests that were taken from the queue and have not ended."""

    @abstractmethod
    def fail(self, request: Q, error: BaseException) -> None:
        """End a request with an error, unless it has ended or was cancelled."""

    def observe(self, measure: str, value: float) -> None:
        """Tell the caller's observer; one that raises is told no more."""
        try:
            self.observer(measure, value)
        except Exception:
            log.exception("the observer of measures raised, and gets no more")
            self.observer = observe_nothing

    def free(self) -> None:
        """Free what the thread holds, when it has ended."""

    def count_free(self) -> int:
        """Return how many requests may wait beyond the queue's limit, as their turn comes at once."""
        return 0

    def put(self, request: Q, client: str) -> None:
        """Let a request wait for its turn; raises a QueueFullError or a ClosedError."""
        with self.changed:
            if self.closed:
                raise ClosedError
            self.waiting.put(request, client, spare=self.count_free())
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self.thread.start()
            self.changed.notify()

    def stop(self) -> None:
        """Take no more requests, and end all before the next turn; wait for nothing."""
        with self.changed:
            self.closed = True
            self.changed.notify()

    def close(self) -> None:
        """End all requests with a ClosedError, when the turn that runs has ended."""
        self.stop()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()

    def end_unwanted(self) -> None:
        """End requests that wait though nobody wants them any more."""
        if not self.waiting:
            return
        with self.changed:
            unwanted = self.waiting.remove(lambda request: not request.is_wanted)
        for request in unwanted:
            self.end(request)

    def end(self, request: Q) -> None:
        """End a request that is not wanted any more."""
        self.fail(request, DeadlineError("the deadline passed before the answer was complete"))

    def _run(self) -> None:
        error: BaseException = ClosedError()
        try:
            while self._wait_for_work():
                self.run_turn()
        except BaseException as stopped:
            log.exception("%s stopped", self.name)
            error = stopped
            raise
        finally:
            with self.changed:
                self.closed = True
                waiting = self.waiting.remove(lambda _: True)
            for request in [*self.list_running(), *waiting]:
                self.fail(request, error)
            self.free()

    def _wait_for_work(self) -> bool:
        """Return whether there is some; False when it was closed."""
        with self.changed:
            while not self.closed and not self.waiting and not self.list_running():
                self.changed.wait()
            return not self.closed


def find_deadline(timeout: float | None) -> float | None:
    """Return the time.monotonic() at which so many seconds have passed."""
    if timeout is None:
        return None
    check_positive("timeout", timeout, "None waits as long as it takes")
    return time.monotonic() + timeout


def has_passed(deadline: float | None) -> bool:
    """Return whether a deadline of `find_deadline` has passed."""
    return deadline is not None and time.monotonic() > deadline
