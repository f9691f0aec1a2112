"""Rows of a cache that requests acquire and release while others go on, and the prompts that they keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..backends.backend import Array
from ..backends.buckets import find_bucket
from .caches import has_row_lengths
from .decoder import Decoder, DecoderRun
from .history import TokenHistory
from .state import LOGITS

MIN_KEPT = 32  # tokens: fewer are computed again as fast as they are copied
MIN_OVERLAP = 0.5  # of what a free row holds: a request that begins so takes the row over, else a copy


Scope: TypeAlias = tuple[str, int]  # whose requests share what was computed, and by which adapter


class RequestSlot:
    """The place of one request: the tokens that were computed for it, in a row of a cache."""

    def __init__(self, row: int, run: DecoderRun) -> None:
        self.row = row
        self.run = run
        self.taken = False
        self.tokens = TokenHistory(())  # whose keys and values the row has
        self.scope: Scope = ("", 0)  # of the prompts that may use them
        self.scores: Array | None = None  # of a step in which another slot failed
        self.last_use = 0

    def count_common(self, prompt: npt.NDArray[np.int64], scope: Scope) -> int:
        """Return how many tokens of the row a prompt begins with, where it may use them."""
        if scope != self.scope:
            return 0
        shorter = min(len(self.tokens), len(prompt))
        different = np.flatnonzero(np.asarray(self.tokens)[:shorter] != prompt[:shorter])
        return int(different[0]) if len(different) else shorter


class RequestSlots(ABC):
    """The slots of one decoder; see `make_slots`."""

    @abstractmethod
    def acquire(
        self, prompt: Sequence[int], scope: str = "", adapter: int = 0
    ) -> tuple[RequestSlot, int] | None:
        """Return a free slot, and how many tokens of the prompt (never all) it holds; None without one.

        Only prompts of the same scope, with the same adapter, use what one of them computed.
        """

    @abstractmethod
    def prefill(self, slot: RequestSlot, tokens: Sequence[int], outputs: Sequence[str] = LOGITS) -> Array:
        """Run tokens behind those of a slot; return the scores (1, ...) behind the last one."""

    @abstractmethod
    def decode(
        self, slots: Sequence[RequestSlot], tokens: Sequence[int], outputs: Sequence[str] = LOGITS
    ) -> Array:
        """Run one token for each of some slots; return the scores (slots, ...) behind them."""

    @abstractmethod
    def release(self, slot: RequestSlot) -> None:
        """Free a slot, whatever its request came to. What it holds is kept as long as there is room."""


class SharedSlots(RequestSlots):
    """Rows of one `RowState` (`ort`, `inplace`), each of which has a length of its own.

    The first rows are for requests; a step runs as many of them as reach to the last one that is taken. The
    rows behind those keep what earlier requests left, until it is the longest unused.

    Args:
        running: rows for requests.
        kept: rows that keep prompts.
        capacity: tokens of each row.
    """

    def __init__(self, decoder: Decoder, running: int, kept: int, capacity: int) -> None:
        self.run = decoder.start(running + kept, capacity, reading=1)  # each prompt in steps of its own
        self.slots = [RequestSlot(row, self.run) for row in range(running)]
        self.kept = [RequestSlot(running + row, self.run) for row in range(kept)]
        self._time = 0  # counts uses
        self._has_gaps = False  # whether a row may be free before one that is taken

    def acquire(
        self, prompt: Sequence[int], scope: str = "", adapter: int = 0
    ) -> tuple[RequestSlot, int] | None:
        free = [slot for slot in self.slots if not slot.taken]
        if not free:
            return None
        known = np.asarray(prompt, np.int64)[:-1]  # the last token's scores are wanted
        best = max(self.slots + self.kept, key=lambda slot: slot.count_common(known, (scope, adapter)))
        common = self.run.find_kept(best.row, best.count_common(known, (scope, adapter)))
        if best in free and common >= MIN_OVERLAP * len(best.tokens):
            slot = best
        else:
            slot = min(free, key=lambda one: one.row)
            self._keep(slot, best)
            if slot is not best:
                self.run.copy_row(best.row, slot.row, common)
        self.run.truncate_row(slot.row, common)
        slot.tokens = TokenHistory(known[:common].tolist())
        slot.scope = (scope, adapter)
        self.run.set_adapter(slot.row, adapter)
        slot.taken = True
        self._has_gaps = True
        self._use(slot)
        if common and best is not slot:
            self._use(best)
            if common == len(best.tokens) and not best.taken:
                best.last_use = 0  # the slot has all of it
        return slot, common

    def prefill(self, slot: RequestSlot, tokens: Sequence[int], outputs: Sequence[str] = LOGITS) -> Array:
        scores = self.run.extend_row(slot.row, tokens, outputs)
        for token in tokens:
            slot.tokens.append(token)
        return scores

    def decode(
        self, slots: Sequence[RequestSlot], tokens: Sequence[int], outputs: Sequence[str] = LOGITS
    ) -> Array:
        if self._has_gaps:
            self._close_gaps()
        rows = [slot.row for slot in slots]
        width = self._count_rows(rows)
        ids = np.zeros((width, 1), np.int64)
        ids[rows, 0] = tokens
        valid = None
        if width > len(rows):  # a prompt is computed in a row between, or a free row is computed along
            valid = np.zeros((width, 1), bool)
            valid[rows] = True
        if width > len(rows) and self.run.decoder.captures_steps:  # all rows, so that there are few shapes
            scores = self.run.step(ids, valid, np.arange(width), outputs)[rows]
        else:
            scores = self.run.step(ids, valid, rows, outputs)
        for slot, token in zip(slots, tokens, strict=True):
            slot.tokens.append(token)
        return scores

    def release(self, slot: RequestSlot) -> None:
        slot.taken = False
        self._has_gaps = True
        self._use(slot)

    def _count_rows(self, rows: Sequence[int]) -> int:
        """Return how many rows a step computes: up to the last of these, and a few more where it is captured.

        A free row that is full is left out, as the step would write over its last token.
        """
        width = 1 + max(rows)
        if not self.run.decoder.captures_steps:
            return width
        wider = find_bucket(width, len(self.slots))
        return width if any(self.run.is_full(row) for row in range(width, wider)) else wider

    def _use(self, slot: RequestSlot) -> None:
        self._time += 1
        slot.last_use = self._time

    def _keep(self, slot: RequestSlot, *others: RequestSlot) -> None:
        """Save what a free row holds, before it is written over, where what was unused the longest is.

        Rows that no request has keep prompts too; `others` stay as they are.
        """
        rows = [one for one in self.slots + self.kept if one is not slot]
        places = [one for one in rows if not one.taken and one not in others]
        held = np.asarray(slot.tokens)
        if len(held) < MIN_KEPT or not places:
            return
        if any(one.count_common(held, slot.scope) == len(held) for one in rows):
            return
        oldest = min(places, key=lambda one: one.last_use)
        self.run.copy_row(slot.row, oldest.row, len(held))
        oldest.tokens = slot.tokens
        oldest.scope = slot.scope
        oldest.last_use = slot.last_use

    def _close_gaps(self) -> None:
        """Move the taken rows together: a step costs time for each row up to the last."""
        taken = sum(slot.taken for slot in self.slots)
        holes = [slot for slot in self.slots[:taken] if not slot.taken]
        beyond = [slot for slot in self.slots[taken:] if slot.taken]
        for hole, slot in zip(holes, reversed(beyond), strict=True):
            self._keep(hole, *holes)
            self.run.copy_row(slot.row, hole.row, len(slot.tokens))
            # The slot goes with its request; the hole, now behind, has what the slot had: nothing of worth.
            slot.row, hole.row = hole.row, slot.row
            hole.tokens = TokenHistory(())
            hole.last_use = 0
            self.run.truncate_row(hole.row, 0)
        self.slots.sort(key=lambda slot: slot.row)
        self._has_gaps = False


class SeparateSlots(RequestSlots):
    """Each request in a cache of its own, for dialects whose rows grow together (`portable`)."""

    def __init__(self, decoder: Decoder, running: int, capacity: int) -> None:
        self.decoder = decoder
        self.capacity = capacity
        self.free = running

    def acquire(
        self, prompt: Sequence[int], scope: str = "", adapter: int = 0
    ) -> tuple[RequestSlot, int] | None:
        if not self.free:
            return None
        slot = RequestSlot(0, self.decoder.start(1, self.capacity, adapters=[adapter]))
        slot.taken = True
        self.free -= 1
        return slot, 0

    def prefill(self, slot: RequestSlot, tokens: Sequence[int], outputs: Sequence[str] = LOGITS) -> Array:
        ids = np.asarray([tokens], np.int64)
        return slot.run.step(ids, np.ones_like(ids, bool), [len(tokens) - 1], outputs)

    def decode(
        self, slots: Sequence[RequestSlot], tokens: Sequence[int], outputs: Sequence[str] = LOGITS
    ) -> Array:
        for slot, token in zip(slots, tokens, strict=True):
            if slot.scores is None:  # else it has run already, and another one failed
                slot.scores = slot.run.decode([token], outputs=outputs)
        scores = np.concatenate([slot.scores for slot in slots if slot.scores is not None])
        for slot in slots:
            slot.scores = None
        return scores

    def release(self, slot: RequestSlot) -> None:
        if slot.taken:
            slot.taken = False
            self.free += 1


def make_slots(decoder: Decoder, running: int, kept: int, capacity: int) -> RequestSlots:
    """Return slots for `running` requests of up to `capacity` tokens, and rows that keep `kept` prompts."""
    if has_row_lengths(decoder.artifact):
        return SharedSlots(decoder, running, kept, capacity)
    return SeparateSlots(decoder, running, capacity)
