"""Workers that are processes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_connections
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import parent_process
from typing import Any

from ..signals import ENDING, hold_signals
from .engine import Lost, Outcome
from .part_runner import Failure, JobSpec, run_part
from .plan import Part
from .result import PartResult

QUEUED = 1  # parts that wait for each worker, so that none waits for the next part
SECONDS_TO_END = (
    5.0  # after which a worker is killed: native code that holds Python's lock ends by nothing else
)


class WorkerContext(SpawnContext):
    """Starts processes, and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[SpawnProcess] = []

    def Process(  # type: ignore[override]  # noqa: N802  # a class of that name in the base
        self, *args: Any, **options: Any
    ) -> SpawnProcess:
        """Return a process, as `multiprocessing.Process`."""
        process = SpawnProcess(*args, **options)
        self.started.append(process)
        return process

    def end(self, seconds: float) -> None:
        """Wait until all processes have ended; kill those that have not after so many seconds."""
        deadline = time.monotonic() + seconds
        for process in self.started:
            if process.pid is None:  # it was never started
                continue
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()


class ProcessEngine:
    """Computes the parts of a job in processes, which end with this one."""

    def __init__(self, spec: JobSpec, workers: int) -> None:
        self.spec = spec
        self.workers = workers
        self._running: dict[Future[PartResult | Failure], Part] = {}
        self._pool = self._make_pool()

    def count_slots(self) -> int:
        """Return the number of workers, and of parts that wait for them."""
        return self.workers * (1 + QUEUED)

    def start(self, part: Part) -> None:
        """Let a worker compute a part."""
        try:
            with hold_signals(), block_ctrl_c():
                future = self._pool.submit(run_part, self.spec, part)  # which may start a process
        except BrokenProcessPool as error:  # since the last part was started
            future = Future()
            future.set_exception(error)
        self._running[future] = part

    def wait(self) -> list[tuple[Part, Outcome]]:
        """Return the parts that ended."""
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        outcomes: list[tuple[Part, Outcome]] = []
        is_broken = False
        for future in done:
            part = self._running.pop(future)
            try:
                outcomes.append((part, future.result()))
            except BrokenProcessPool as error:
                outcomes.append((part, Lost(str(error))))
                is_broken = True
        if is_broken:  # all its workers have ended, and all that they were at is lost
            outcomes += [(part, Lost("another worker died")) for part in self._running.values()]
            self._running.clear()
            self.close()
            self._pool = self._make_pool()
        return outcomes

    def close(self) -> None:
        """End the workers, and the pool's thread: one left may close what Python's exit still uses."""
        self._end_workers.close()
        self._context.end(SECONDS_TO_END)
        self._pool.shutdown(cancel_futures=True)
        self._end_of_pool.close()

    def _make_pool(self) -> ProcessPoolExecutor:
        """Return a pool whose workers end as soon as this process closes its side of a pipe."""
        self._context = WorkerContext()
        self._end_of_pool, self._end_workers = self._context.Pipe(duplex=False)
        return ProcessPoolExecutor(
            self.workers, mp_context=self._context, initializer=prepare_worker, initargs=(self._end_of_pool,)
        )


@contextlib.contextmanager
def block_ctrl_c() -> Iterator[None]:
    """Block Ctrl-C's signal, which a terminal sends to all processes, in this thread and those it starts."""
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare_worker(end_of_pool: Connection) -> None:
    """Let this process end with its pool or its parent, which alone takes Ctrl-C's signal."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=end_with_pool, args=(end_of_pool,), daemon=True).start()


def end_with_pool(end_of_pool: Connection) -> None:
    """End this process when its pool's pipe is closed or its parent has ended."""
    parent = parent_process()
    assert parent is not None  # who starts a worker
    wait_for_connections([end_of_pool, parent.sentinel])
    os._exit(1)
