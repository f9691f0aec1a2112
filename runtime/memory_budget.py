"""The bytes that one model may use: its weights, and what the calls that run at the same time hold.

The rule. A call that needs more than the limit leaves beside the weights is refused before anything runs. One
that would fit alone, but not beside the calls that are running, waits until they are done, and is refused
after ten minutes, with what they hold. It is refused instead of waiting where the thread that makes it holds
memory itself, as with a stream that it has not finished: it would wait for itself. Memory belongs to the
thread that used it last.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import ClosedError, MemoryLimitError

WAIT_TIMEOUT = 600.0  # seconds that a call waits for others: longer than any of them should take
POLL = 0.1  # seconds after which a call that waits looks again, told or not


class Reservation:
    """Bytes that a call holds until it releases them. Releasing twice is fine."""

    def __init__(self, budget: MemoryBudget, count: int, what: str) -> None:
        self._budget = budget
        self.count = count
        self.what = what  # what they are for
        self.thread = threading.current_thread()  # that used them last

    def use(self) -> None:
        """Make it this thread's: a stream may be read, or a kept prompt be taken over, by another one."""
        if self._budget.limit is not None:
            self.thread = threading.current_thread()

    def release(self) -> None:
        """Give the bytes back."""
        self._budget.give_back(self)


class Lease:
    """Releases a reservation when it is freed: as an object's last field, behind the memory in the others."""

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation

    def __del__(self) -> None:
        self.reservation.release()


class MemoryBudget:
    """Counts what the calls of one model hold; without a limit in bytes it counts nothing."""

    def __init__(self, limit: int | None, weight_bytes: int = 0) -> None:
        self.limit = limit
        self.weight_bytes = weight_bytes
        # A call may end while garbage is collected, in the middle of anything here, so no sum is kept that
        # such an end could spoil.
        self._held: dict[Reservation, None] = {}
        self._changed = threading.Condition()  # its lock may be taken twice by one thread
        self._closed = False
        self._make_room: weakref.WeakMethod[Callable[[], object]] | None = None

    def count_available(self) -> int | None:
        """Return the bytes that a call can have when it runs alone; None without a limit."""
        return None if self.limit is None else max(0, self.limit - self.weight_bytes)

    def has_room(self, count: int) -> bool:
        """Return whether a call could hold so many bytes now, without waiting."""
        return not self._is_short_of(count)

    def count_held(self) -> int:
        """Return the bytes that calls hold now, without the weights."""
        return sum(reservation.count for reservation in list(self._held))

    def check(self, count: int, what: str, hint: str = "Use smaller batches") -> None:
        """Refuse bytes beside the weights that do not fit even when the call runs alone.

        `what` says what they are for, `hint` what a user can do who needs less.
        """
        if self.limit is not None and self.weight_bytes + count > self.limit:
            raise self._make_error(count, what, hint)

    @contextmanager
    def reserve(self, count: int, what: str, hint: str = "Use smaller batches") -> Iterator[None]:
        """Hold bytes while a call runs; as `hold` otherwise."""
        reservation = self.hold(count, what, hint)
        try:
            yield
        finally:
            reservation.release()

    def hold(self, count: int, what: str, hint: str = "Use smaller batches") -> Reservation:
        """Hold bytes until they are released; waits for other calls where it fits only without them.

        Raises a MemoryLimitError where it does not fit, or not beside what this thread holds already, or
        other calls did not end in time, and a ClosedError where the model was closed while the call waited.
        """
        asked = Reservation(self, count, what)
        if self.limit is not None:
            self.check(count, what, hint)
            self._take(asked, hint)
        return asked

    def give_back(self, reservation: Reservation) -> None:
        """Let go of what a call held, if it still does."""
        if reservation in self._held:
            self._held.pop(reservation, None)
            with self._changed:
                self._changed.notify_all()

    def make_room_by(self, make_room: Callable[[], object]) -> None:
        """Call a method, of an object that this keeps not alive, to free what is only kept in case.

        It is called while a call waits, and before one is refused.
        """
        self._make_room = weakref.WeakMethod(make_room)

    def close(self) -> None:
        """Wake the calls that wait, which end with a ClosedError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take(self, asked: Reservation, hint: str) -> None:
        """Wait until there is room.

        A call may end, or its memory be kept in case, without telling: what frees it may run in this very
        thread, between a look and the wait. So who waits looks again from time to time.
        """
        if self._add(asked):
            return
        gc.collect()  # what an abandoned call held may wait for this
        deadline = time.monotonic() + WAIT_TIMEOUT
        while True:
            make_room = None if self._make_room is None else self._make_room()
            if make_room is not None:
                make_room()
                del make_room  # who waits does not keep the model alive
            if self._add(asked):
                return
            if self._closed:
                raise ClosedError
            others = list(self._held)
            held_here = sum(other.count for other in others if other.thread == asked.thread)
            if held_here:
                holder = "an unfinished call of this thread holds"
                hint = f"Finish or close that call (a stream, an iteration) first. {hint}"
                raise self._make_error(asked.count, asked.what, hint, held_here, holder)
            if time.monotonic() > deadline:
                held = sum(other.count for other in others)
                names = ", ".join(sorted({other.what for other in others}))
                holder = f"other calls held for {WAIT_TIMEOUT:.0f} seconds ({names})"
                hint = f"Finish or close those calls (streams, too) first. {hint}"
                raise self._make_error(asked.count, asked.what, hint, held, holder)
            with self._changed:
                if self._is_short_of(asked.count):
                    self._changed.wait(POLL)

    def _add(self, asked: Reservation) -> bool:
        with self._changed:
            if self._is_short_of(asked.count):
                return False
            self._held[asked] = None
            return True

    def _is_short_of(self, count: int) -> bool:
        return self.limit is not None and self.weight_bytes + self.count_held() + count > self.limit

    def _make_error(
        self, count: int, what: str, hint: str, held: int = 0, holder: str = ""
    ) -> MemoryLimitError:
        assert self.limit is not None
        needed = self.weight_bytes + count + held
        parts = [f"{self.weight_bytes / 1e6:.1f} MB of weights", f"{count / 1e6:.1f} MB for {what}"]
        if holder:
            parts.append(f"{held / 1e6:.1f} MB that {holder}")
        return MemoryLimitError(
            f"{needed / 1e6:.1f} MB are needed: {', '.join(parts[:-1])} and {parts[-1]};"
            f" memory_limit is {self.limit / 1e6:.1f} MB. {hint}",
            needed=needed,
            limit=self.limit,
        )


def find_largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that fits, where smaller ones fit too; 0 where none does."""
    low = 0
    while low < most:
        middle = (low + most + 1) // 2
        low, most = (middle, most) if fits(middle) else (low, middle - 1)
    return low


def describe_fitting(need: Callable[[int, int], float], limit: int, batch: int, length: int) -> str:
    """Return which smaller batch or length would fit a limit, in words; "" where none does.

    Args:
        need: returns the bytes of a batch and a length.
        limit: in bytes.
        batch: what does not fit.
        length: what does not fit.
    """
    rows = find_largest(lambda number: need(number, length) <= limit, batch - 1)
    tokens = find_largest(lambda number: need(batch, number) <= limit, length - 1)
    found = [f"a batch of {rows}"] if rows else []
    found += [f"a length of {tokens}"] if tokens else []
    return f"{' or '.join(found)} would fit" if found else ""
