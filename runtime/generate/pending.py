"""A request that was submitted: its chunks as they come, its answer when it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import RLock

from ..decoding.chunk import Chunk
from ..decoding.slots import RequestSlot
from ..scheduling.worker import has_passed
from .generation import Generation, make_generation
from .row import Row


class PendingGeneration:
    """What `TextGenerator.submit` returns. Safe to use from any thread.

    Attributes:
        future: has the `Generation` when it is there, or what went wrong; `asyncio.wrap_future` awaits it.
        client: whose request it is.

    Example:
        >>> pending = model.submit("And it came to pass", max_new_tokens=60)
        >>> for chunk in pending:
        ...     print(chunk, end="", flush=True)
        >>> pending.result().finish_reason
        'length'
    """

    def __init__(self, row: Row, client: str, deadline: float | None) -> None:
        self.future: Future[Generation] = Future()
        self.future.set_running_or_notify_cancel()  # so its cancel() does nothing; only ours does
        self.client = client
        self.row = row  # belongs to the scheduler's thread from now on
        self.deadline = deadline  # of time.monotonic()
        self.cancelled = False
        self.submitted = time.perf_counter()
        self.begun = 0.0  # when its prompt's turn came
        self.first_token = 0.0
        self.last_token = 0.0
        self.slot: RequestSlot | None = None
        self.prefilled = 0  # tokens of the prompt that are computed
        self._listener: Callable[[Chunk], None] | None = None
        self._ended = False
        self._lock = RLock()  # of the two above; a listener may subscribe another

    def __repr__(self) -> str:
        state = "ended" if self.done() else "running" if self.first_token else "waiting"
        return f"PendingGeneration({state}, {len(self.row.token_ids)} tokens)"

    def done(self) -> bool:
        """Return whether the answer, or what went wrong, is there."""
        return self.future.done()

    @property
    def is_wanted(self) -> bool:
        """Whether it was not cancelled, and its deadline has not passed."""
        return not (self.cancelled or has_passed(self.deadline))

    def result(self, timeout: float | None = None) -> Generation:
        """Return the answer when it is there.

        Raises:
            TimeoutError: it is not there after so many seconds; the request goes on.
            DeadlineError: its deadline passed.
            PlanForgeError: the engine failed, or the model was closed.
        """
        return self.future.result(timeout)

    def cancel(self) -> None:
        """End the answer before its next step; the result has the finish reason "cancelled"."""
        self.cancelled = True

    def subscribe(self, listener: Callable[[Chunk], None]) -> None:
        """Call a function in the scheduler's thread with each chunk; it must return at once.

        At most one may listen. The first chunk has all that came before.
        """
        with self._lock:
            self._listener = listener
            if self._ended:
                listener(self.row.make_chunk())

    def __iter__(self) -> Iterator[Chunk]:
        """Yield the chunks, the last of which has the finish reason; raise what ended the request.

        Who leaves the loop before its end cancels the request.
        """
        chunks: SimpleQueue[Chunk | None] = SimpleQueue()
        self.subscribe(chunks.put)
        self.future.add_done_callback(lambda _: chunks.put(None))
        try:
            while (chunk := chunks.get()) is not None:
                yield chunk
        except GeneratorExit:
            self.cancel()
            raise
        self.future.result()

    def notify(self) -> None:
        """Give the listener what is new."""
        with self._lock:
            if self._listener is not None:
                self._listener(self.row.make_chunk())

    def finish(self) -> None:
        """Give out the last chunk and the answer, or the error that the listener raises."""
        seconds = [self.first_token - self.begun, self.last_token - self.first_token]
        answer = make_generation(self.row, seconds if self.first_token else [0.0])
        try:
            with self._lock:  # who subscribes meanwhile gets the last chunk once
                self._ended = True
                self.notify()
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(answer)
