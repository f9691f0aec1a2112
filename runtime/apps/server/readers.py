"""Threads that do what takes longer than the event loop may, such as reading a prompt; clients take turns."""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from ...errors import ClosedError
from ...scheduling.queue import FairQueue
from ...scheduling.steps import Steps
from .settings import ServerSettings

T = TypeVar("T")
LARGE = 262_144  # bytes that delay no smaller request


class Job(Generic[T]):
    """Work of a client that waits for a reader; `future` gets its result."""

    def __init__(self, steps: Steps[T], client: str) -> None:
        self.client = client
        self.future: Future[T] = Future()
        self._steps = steps
        self._context = contextvars.copy_context()  # with the request's id, for the log
        self._error: BaseException | None = None

    def stop(self, error: BaseException) -> None:
        """Let it fail instead of its next step."""
        self._error = error

    def check(self) -> None:
        """Raise what stops it, amid a long step."""
        if self._error is not None:
            raise self._error

    def run_step(self) -> bool:
        """Run the next step; return whether there are more."""
        try:
            if self._error is not None:
                raise self._error
            self._context.run(next, self._steps)
        except StopIteration as end:
            self.future.set_result(end.value)
        except BaseException as error:
            self._steps.close()
            self.future.set_exception(error)
        else:
            return True
        return False


class WorkerPool:
    """Threads that run the steps of jobs; a client's next step waits for those of the others.

    Args:
        name: of its threads.
        count: how many there are.
        settings: say how many jobs may wait.
    """

    def __init__(self, name: str, count: int, settings: ServerSettings) -> None:
        self._waiting: FairQueue[Job[Any]] = FairQueue(
            settings.queue_size, divided=settings.has_several_clients
        )
        self._threads = ThreadPoolExecutor(count, name)
        self._lock = threading.Lock()
        self._closed = False

    def put(self, job: Job[Any], *, begun: bool = False) -> None:
        """Let a job wait for its turn; raises a QueueFullError, unless its request had a turn before."""
        with self._lock:
            if self._closed:
                raise ClosedError
            if begun:
                self._waiting.put_back(job, job.client)
            else:
                self._waiting.put(job, job.client)
            self._threads.submit(self._run_next)

    def stop(self, job: Job[Any], error: BaseException) -> None:
        """Let a job fail: at once if it waits, else when its step is done, unless that is its last."""
        job.stop(error)
        with self._lock:
            waited = self._waiting.remove(lambda one: one is job)
        for one in waited:
            one.run_step()

    def close(self) -> None:
        """Let the jobs that wait fail, and those that run before their next step; wait for none."""
        with self._lock:
            self._closed = True
            waiting = self._waiting.remove(lambda _: True)
            self._threads.shutdown(wait=False)
        for job in waiting:
            job.stop(ClosedError())
            job.run_step()

    def _run_next(self) -> None:
        with self._lock:
            if not self._waiting:  # it was stopped
                return
            job = self._waiting.take()
        if not job.run_step():
            return
        try:
            self.put(job, begun=True)
        except ClosedError as error:
            job.stop(error)
            job.run_step()


class Readers:
    """The threads of a server.

    What is large has one of its own, grammars and explanations too: none delays what is read soon.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._usual = WorkerPool("planforge-reader", settings.readers, settings)
        self._large = WorkerPool("planforge-large-reader", 1, settings)
        self._grammars = WorkerPool("planforge-grammar-reader", 1, settings)
        self.explaining = WorkerPool("planforge-explainer", 1, settings)

    def choose(self, size: int, *, compiles: bool = False) -> WorkerPool:
        """Return the threads that read so many bytes, or compile a grammar."""
        if size > LARGE:
            return self._large
        return self._grammars if compiles else self._usual

    def close(self) -> None:
        """End what waits; what runs ends with its step."""
        for pool in (self._usual, self._large, self._grammars, self.explaining):
            pool.close()
