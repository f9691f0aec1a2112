"""The bytes that one model may use: its weights, and what the calls that run at the same time hold.

The rule. A call that needs more than the limit leaves beside the weights is refused. One that would fit
alone, but not beside the calls that are running, waits until they are done. It is refused instead of waiting
where the thread that makes it holds memory itself, as with a stream that it has not finished: it would wait
for itself.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from .errors import ClosedError, MemoryLimitError


class MemoryBudget:
    """Counts what the calls of one model hold.

    Args:
        limit: bytes for everything; None for no limit, which counts nothing.
        weight_bytes: what the weights take as long as the model is open.
    """

    def __init__(self, limit: int | None, weight_bytes: int = 0) -> None:
        self.limit = limit
        self.weight_bytes = weight_bytes
        # By a key of its own: the bytes, and the thread that asked. A call may end while garbage is
        # collected, in the middle of anything here, so no sum is kept that such an end could spoil.
        self._held: dict[object, tuple[int, int]] = {}
        self._changed = threading.Condition()  # its lock may be taken twice by one thread
        self._closed = False
        self._make_room: weakref.WeakMethod[Callable[[], object]] | None = None

    def available(self) -> int | None:
        """Return the bytes that a call can have when it runs alone; None without a limit."""
        return None if self.limit is None else max(0, self.limit - self.weight_bytes)

    def held(self) -> int:
        """Return the bytes that calls hold now, without the weights."""
        return sum(count for count, _ in list(self._held.values()))

    @contextmanager
    def reserve(self, count: int, what: str, way_out: str = "Use smaller batches") -> Iterator[None]:
        """Hold bytes while a call runs; waits for other calls where it fits only without them.

        Args:
            count: bytes that the call needs beside the weights.
            what: what they are for, as in "a cache of 8 x 64 tokens".
            way_out: what a user can do who needs less, as a sentence without its full stop.

        Raises:
            MemoryLimitError: it does not fit, or not beside what this thread holds already.
            ClosedError: the model was closed while the call waited.
        """
        release = self.hold(count, what, way_out)
        try:
            yield
        finally:
            release()

    def hold(self, count: int, what: str, way_out: str = "Use smaller batches") -> Callable[[], None]:
        """Hold bytes until the function that is returned is called; as `reserve` otherwise."""
        key = object()
        self._take(key, count, what, way_out)
        return partial(self._give_back, key)

    def before_waiting(self, make_room: Callable[[], object]) -> None:
        """Call a method before a call waits or is refused, to let go of what is only kept in case.

        The method's object is not kept alive by this.
        """
        self._make_room = weakref.WeakMethod(make_room)

    def close(self) -> None:
        """Wake the calls that wait, which end with a ClosedError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take(self, key: object, count: int, what: str, way_out: str) -> None:
        if self.limit is None:
            return
        thread = threading.get_ident()
        if self.weight_bytes + count > self.limit:
            raise self._refusal(count, what, way_out, 0)
        if self._is_short_of(count):
            make_room = None if self._make_room is None else self._make_room()
            if make_room is not None:
                make_room()
            gc.collect()  # what an abandoned call held may wait for this
        with self._changed:
            while self._is_short_of(count):
                if self._closed:
                    raise ClosedError("the model was closed; load() it again")
                own = sum(size for size, holder in list(self._held.values()) if holder == thread)
                if own:
                    raise self._refusal(count, what, way_out, own)
                self._changed.wait()
            self._held[key] = (count, thread)

    def _is_short_of(self, count: int) -> bool:
        return self.limit is not None and self.weight_bytes + self.held() + count > self.limit

    def _give_back(self, key: object) -> None:
        if self._held.pop(key, None) is not None:
            with self._changed:
                self._changed.notify_all()

    def _refusal(self, count: int, what: str, way_out: str, own: int) -> MemoryLimitError:
        assert self.limit is not None
        needed = self.weight_bytes + count + own
        parts = [f"{self.weight_bytes / 1e6:.1f} MB of weights", f"{count / 1e6:.1f} MB for {what}"]
        if own:
            parts.append(f"{own / 1e6:.1f} MB that an unfinished call of this thread holds")
            way_out = f"Finish or close that call (a stream, an iteration) first. {way_out}"
        summed = f"{', '.join(parts[:-1])} and {parts[-1]}"
        limit = f"memory_limit is {self.limit / 1e6:.1f} MB"
        return MemoryLimitError(
            f"{needed / 1e6:.1f} MB are needed: {summed}; {limit}. {way_out}",
            needed=needed,
            limit=self.limit,
        )
