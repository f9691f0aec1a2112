"""Rows of a cache that requests take and leave while others go on, and the prompts that rows still hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..backends.backend import Array
from .cache import LOGITS
from .decoder import Decoder, DecoderRun
from .history import TokenHistory

LEAST_KEPT = 32  # tokens: fewer are computed again as fast as they are copied
LEAST_OVERLAP = 0.5  # of what a free row holds: a request that begins so takes the row over, else a copy


class Seat:
    """The place of one request: the tokens that were computed for it, in a row of a cache."""

    def __init__(self, row: int, run: DecoderRun) -> None:
        self.row = row
        self.run = run
        self.taken = False
        self.tokens = TokenHistory(())  # whose keys and values the row has
        self.scope = ""  # of the prompts that may use them
        self.last_use = 0

    def count_common(self, prompt: npt.NDArray[np.int64], scope: str) -> int:
        """Return how many tokens of the row a prompt begins with, where it may use them."""
        if scope != self.scope:
            return 0
        shorter = min(len(self.tokens), len(prompt))
        different = np.flatnonzero(np.asarray(self.tokens)[:shorter] != prompt[:shorter])
        return int(different[0]) if len(different) else shorter


class Seats(ABC):
    """The seats of one decoder; see `make_seats`."""

    @abstractmethod
    def take(self, prompt: Sequence[int], scope: str = "") -> tuple[Seat, int] | None:
        """Return a free seat, and how many tokens of the prompt (never all) it holds; None without one.

        Only prompts of the same scope use what one of them computed.
        """

    @abstractmethod
    def prefill(self, seat: Seat, tokens: Sequence[int], outputs: Sequence[str] = LOGITS) -> Array:
        """Run tokens behind those of a seat; return the scores (1, ...) behind the last one."""

    @abstractmethod
    def decode(self, seats: Sequence[Seat], tokens: Sequence[int], outputs: Sequence[str] = LOGITS) -> Array:
        """Run one token for each of some seats; return the scores (seats, ...) behind them."""

    @abstractmethod
    def leave(self, seat: Seat) -> None:
        """Free a seat, whatever its request came to. What it holds is kept as long as there is room."""


class SharedSeats(Seats):
    """Rows of one cache with fixed slots (`ort`, `inplace`), each of which has a length of its own.

    The first rows are for requests; a step runs as many of them as reach to the last one that is taken. The
    rows behind those keep what earlier requests left, until it is the longest unused.

    Args:
        running: rows for requests.
        kept: rows that keep prompts.
        capacity: tokens of each row.
    """

    def __init__(self, decoder: Decoder, running: int, kept: int, capacity: int) -> None:
        self.run = decoder.start(running + kept, capacity)
        self.seats = [Seat(row, self.run) for row in range(running)]
        self.kept = [Seat(running + row, self.run) for row in range(kept)]
        self._time = 0  # counts uses
        self._has_gaps = False  # whether a row may be free before one that is taken

    def take(self, prompt: Sequence[int], scope: str = "") -> tuple[Seat, int] | None:
        free = [seat for seat in self.seats if not seat.taken]
        if not free:
            return None
        known = np.asarray(prompt, np.int64)[:-1]  # the last token's scores are wanted
        best = max(self.seats + self.kept, key=lambda seat: seat.count_common(known, scope))
        common = self.run.slots.find_kept(best.row, best.count_common(known, scope))
        if best in free and common >= LEAST_OVERLAP * len(best.tokens):
            seat = best
        else:
            seat = min(free, key=lambda one: one.row)
            self._keep(seat, best)
            if seat is not best:
                self.run.copy_row(best.row, seat.row, common)
        self.run.slots.truncate_row(seat.row, common)
        seat.tokens = TokenHistory(known[:common].tolist())
        seat.scope = scope
        seat.taken = True
        self._has_gaps = True
        self._use(seat)
        if common and best is not seat:
            self._use(best)
            if common == len(best.tokens) and not best.taken:
                best.last_use = 0  # the seat has all of it
        return seat, common

    def prefill(self, seat: Seat, tokens: Sequence[int], outputs: Sequence[str] = LOGITS) -> Array:
        scores = self.run.extend_row(seat.row, tokens, outputs)
        for token in tokens:
            seat.tokens.append(token)
        return scores

    def decode(self, seats: Sequence[Seat], tokens: Sequence[int], outputs: Sequence[str] = LOGITS) -> Array:
        if self._has_gaps:
            self._close_gaps()
        rows = [seat.row for seat in seats]
        width = 1 + max(rows)
        ids = np.zeros((width, 1), np.int64)
        ids[rows, 0] = tokens
        valid = None
        if width > len(rows):  # a prompt is computed in a row between
            valid = np.zeros((width, 1), bool)
            valid[rows] = True
        scores = self.run.step(ids, valid, rows, outputs)
        for seat, token in zip(seats, tokens, strict=True):
            seat.tokens.append(token)
        return scores

    def leave(self, seat: Seat) -> None:
        seat.taken = False
        self._has_gaps = True
        self._use(seat)

    def _use(self, seat: Seat) -> None:
        self._time += 1
        seat.last_use = self._time

    def _keep(self, seat: Seat, *others: Seat) -> None:
        """Save what a free row holds, before it is written over, where what was unused the longest is.

        Rows that no request has keep prompts too; `others` stay as they are.
        """
        rows = [one for one in self.seats + self.kept if one is not seat]
        places = [one for one in rows if not one.taken and one not in others]
        held = np.asarray(seat.tokens)
        if len(held) < LEAST_KEPT or not places:
            return
        if any(one.count_common(held, seat.scope) == len(held) for one in rows):
            return
        oldest = min(places, key=lambda one: one.last_use)
        self.run.copy_row(seat.row, oldest.row, len(held))
        oldest.tokens = seat.tokens
        oldest.scope = seat.scope
        oldest.last_use = seat.last_use

    def _close_gaps(self) -> None:
        """Move the taken rows together: a step costs time for each row up to the last."""
        taken = sum(seat.taken for seat in self.seats)
        holes = [seat for seat in self.seats[:taken] if not seat.taken]
        beyond = [seat for seat in self.seats[taken:] if seat.taken]
        for hole, seat in zip(holes, reversed(beyond), strict=True):
            self._keep(hole, *holes)
            self.run.copy_row(seat.row, hole.row, len(seat.tokens))
            # The seat goes with its request; the hole, now behind, has what the seat had: nothing of worth.
            seat.row, hole.row = hole.row, seat.row
            hole.tokens = TokenHistory(())
            hole.last_use = 0
            self.run.slots.truncate_row(hole.row, 0)
        self.seats.sort(key=lambda seat: seat.row)
        self._has_gaps = False


class SeparateSeats(Seats):
    """Each request in a cache of its own, for dialects whose rows grow together (`portable`)."""

    def __init__(self, decoder: Decoder, running: int, capacity: int) -> None:
        self.decoder = decoder
        self.capacity = capacity
        self.free = running

    def take(self, prompt: Sequence[int], scope: str = "") -> tuple[Seat, int] | None:
        if not self.free:
            return None
        seat = Seat(0, self.decoder.start(1, self.capacity))
        seat.taken = True
        self.free -= 1
        return seat, 0

    def prefill(self, seat: Seat, tokens: Sequence[int], outputs: Sequence[str] = LOGITS) -> Array:
        ids = np.asarray([tokens], np.int64)
        return seat.run.step(ids, np.ones_like(ids, bool), [len(tokens) - 1], outputs)

    def decode(self, seats: Sequence[Seat], tokens: Sequence[int], outputs: Sequence[str] = LOGITS) -> Array:
        scores = [
            seat.run.decode([token], outputs=outputs) for seat, token in zip(seats, tokens, strict=True)
        ]
        return np.concatenate(scores)

    def leave(self, seat: Seat) -> None:
        if seat.taken:
            seat.taken = False
            self.free += 1


def make_seats(decoder: Decoder, running: int, kept: int, capacity: int) -> Seats:
    """Return seats for `running` requests of up to `capacity` tokens, and rows that keep `kept` prompts."""
    if is_separate(decoder):
        return SeparateSeats(decoder, running, capacity)
    return SharedSeats(decoder, running, kept, capacity)


def is_separate(decoder: Decoder) -> bool:
    """Return whether each request needs a cache of its own."""
    return decoder.artifact.dialect == "portable"
