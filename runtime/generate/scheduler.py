"""Continuous batching: requests join and leave the rows of one cache between the steps of the others.

One thread runs the engine. At each turn it gives slots to requests that wait, computes a piece of the prompt
of the request that came first, and then one token for each request whose prompt is computed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from ..backends.backend import Array
from ..decoding.cache_shapes import PREFILL_CHUNK, count_cache_bytes
from ..decoding.caches import has_row_lengths
from ..decoding.candidates import Chosen
from ..decoding.decoder import Decoder
from ..decoding.slots import RequestSlots, make_slots
from ..scheduling.options import Observer
from ..scheduling.queue import FairQueue
from ..scheduling.worker import EngineThread
from .pending import PendingGeneration
from .row import Row, choose_for_rows

log = logging.getLogger("planforge")

# Tokens of prompts that are computed between two steps of running answers, which they delay: for a model of
# 124M parameters on two cores by 20 ms, where a step of 8 rows takes 12. 64 tokens would be 36 ms, and first
# tokens of long prompts come a quarter sooner. A larger model takes longer for both alike.
SHARED_CHUNK = 32
POLL = 0.05  # seconds after which a request that waits for memory looks again


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """How requests share an engine; `ScheduleOptions` says what the fields mean."""

    running: int
    context: int
    prefix_memory: int
    queue_size: int
    share_prompts: bool
    divide_queue: bool
    observe: Observer


class GenerationScheduler(EngineThread[PendingGeneration]):
    """Answers the requests of many callers with one decoder.

    Args:
        decoder: whose graph runs.
        settings: how requests share it; with a memory limit fewer rows than they say, where not all fit.
    """

    def __init__(self, decoder: Decoder, settings: ScheduleSettings) -> None:
        queue: FairQueue[PendingGeneration] = FairQueue(settings.queue_size, divided=settings.divide_queue)
        super().__init__("planforge-scheduler", queue, settings.observe)
        self.decoder = decoder
        self.settings = settings
        self.rows, self.kept = count_rows(decoder, settings)
        self.starting: list[PendingGeneration] = []  # whose prompts are not computed; the first came first
        self.running: list[PendingGeneration] = []  # that get a token at each step
        self._pieces = 0  # of prompts
        self._slots: RequestSlots | None = None

    def submit(self, pending: PendingGeneration) -> None:
        """Let a request wait for its turn; raises a QueueFullError or a ClosedError."""
        self.put(pending, pending.client)

    def count_free(self) -> int:
        return self.rows - len(self.list_running())

    def count_requests(self) -> tuple[int, int]:
        """Return how many requests wait, and how many are being answered."""
        return len(self.waiting), len(self.list_running())

    def free_memory(self) -> None:
        """Drop the cache, with what earlier requests left in it, unless a request uses it."""
        with self.changed:
            if not (self.waiting or self.list_running()):
                self._slots = None

    def list_running(self) -> list[PendingGeneration]:
        return self.starting + self.running

    def fail(self, request: PendingGeneration, error: BaseException) -> None:
        self._leave(request)
        if not request.done():
            request.future.set_exception(error)

    def free(self) -> None:
        self._slots = None

    def end(self, request: PendingGeneration) -> None:
        if not request.cancelled:
            return super().end(request)
        request.row.cancel()
        self._finish(request)

    def run_turn(self) -> None:
        self.end_unwanted()
        for one in [one for one in self.list_running() if not one.is_wanted]:
            self.end(one)
        self._admit()
        self._prefill()
        self._decode()

    def _admit(self) -> None:
        """Let as many requests start as there are slots for."""
        if not self.waiting:
            return
        with self.changed:
            count = min(self.count_free(), len(self.waiting))
            self.starting += [self.waiting.take() for _ in range(count)]

    def _prefill(self) -> None:
        """Compute some of the prompts that are not computed yet."""
        left = SHARED_CHUNK if self.running else PREFILL_CHUNK
        while self.starting and left > 0:
            one = self._choose_prompt()
            if not self._has_room(one):
                if not self.running:
                    with self.changed:
                        self.changed.wait(POLL)
                return
            try:
                left -= self._prefill_piece(one, left)
            except Exception as error:
                self.fail(one, error)

    def _choose_prompt(self) -> PendingGeneration:
        """Return the request whose prompt goes on: the first, or by turns one with much less left.

        A short prompt does not wait for the whole of a long one. Those of like length come one after the
        other, so that the second finds what it has in common with the first.
        """
        self._pieces += 1
        first = self.starting[0]
        shortest = min(self.starting, key=count_left)
        is_short = 2 * count_left(shortest) < count_left(first)
        return shortest if is_short and self._pieces % 2 else first

    def _prefill_piece(self, one: PendingGeneration, most: int) -> int:
        """Compute some of a prompt, or all that is left; return how many tokens that were."""
        slots = self._open_slots()
        if one.slot is None:
            scope = "" if self.settings.share_prompts else one.client
            taken = slots.acquire(one.row.prompt, scope, one.row.request.adapter_slot)
            assert taken is not None  # there are as many slots as requests may run
            one.slot, one.prefilled = taken
            one.begun = time.perf_counter()
            one.row.reused = one.prefilled
        piece = one.row.prompt[one.prefilled : one.prefilled + most]
        scores = slots.prefill(one.slot, piece)
        one.prefilled += len(piece)
        if one.prefilled == len(one.row.prompt):
            self.running.append(one)  # first: who is in neither list is taken for ended
            self.starting.remove(one)
            self.observe("prompt", len(one.row.prompt))
            self.observe("reused", one.row.reused)
            self._take_tokens([one], scores)
        return len(piece)

    def _decode(self) -> None:
        """Compute a token for each running request; of a step that fails, for each by itself."""
        running = list(self.running)
        if not running:
            return
        try:
            self._decode_together(running)
        except Exception as error:
            log.debug("a step of %d requests failed: %s", len(running), error)
            for one in running:
                try:
                    self._decode_together([one])
                except Exception as own_error:
                    self.fail(one, own_error)

    def _decode_together(self, ones: list[PendingGeneration]) -> None:
        tokens = [one.row.token_ids[-1] for one in ones]
        scores = self._open_slots().decode([one.slot for one in ones if one.slot], tokens)
        self.observe("batch", len(ones))
        self._take_tokens(ones, scores)

    def _take_tokens(self, ones: list[PendingGeneration], scores: Array) -> None:
        """Choose each request's next token, and tell who listens; requests that choose alike together."""
        groups: dict[object, list[int]] = {}
        for place, one in enumerate(ones):
            groups.setdefault(describe_choice(one.row), []).append(place)
        for places in groups.values():
            group = [ones[place] for place in places]
            try:
                chosen = choose_for_rows(
                    [one.row for one in group], scores if len(places) == len(ones) else scores[places]
                )
            except Exception as error:
                if len(group) == 1:
                    self.fail(group[0], error)
                    continue
                for place, one in zip(places, group, strict=True):  # not all of them are to blame
                    self._take_tokens([one], scores[place : place + 1])
                continue
            for place, one in enumerate(group):
                try:
                    self._take_token(one, chosen, place)
                except Exception as error:  # of a listener
                    self.fail(one, error)

    def _take_token(self, one: PendingGeneration, chosen: Chosen, place: int) -> None:
        one.row.take(chosen, place)
        now = time.perf_counter()
        if one.first_token:
            self.observe("between_tokens", now - one.last_token)
        else:
            one.first_token = now
            self.observe("first_token", now - one.submitted)
        one.last_token = now
        if one.row.finish_reason is None:
            one.notify()
        else:
            self._finish(one)

    def _finish(self, one: PendingGeneration) -> None:
        if one.slot is not None:
            one.row.found = one.slot.run.list_found(one.slot.row, one.row.count_read())
        self._leave(one)
        self.observe("context", len(one.row.history))
        one.finish()

    def _leave(self, one: PendingGeneration) -> None:
        if one.slot is not None and self._slots is not None:
            self._slots.release(one.slot)
            one.slot = None
        for group in (self.starting, self.running):
            if one in group:
                group.remove(one)

    def _has_room(self, one: PendingGeneration) -> bool:
        """Return whether a request gets its memory without waiting, which would stop all others."""
        if self._slots is None:
            rows = self.rows + self.kept if has_row_lengths(self.decoder.artifact) else 1
        elif one.slot is None and not has_row_lengths(self.decoder.artifact):
            rows = 1
        else:
            return True
        return self.decoder.has_room(rows, self.settings.context, reading=1)

    def _open_slots(self) -> RequestSlots:
        """Return the slots, whose cache is made when the first request needs it."""
        if self._slots is None:
            context = self.settings.context
            log.info(
                "%d requests share a cache of %d tokens each, %d more rows keep prompts",
                self.rows,
                context,
                self.kept,
            )
            self._slots = make_slots(self.decoder, self.rows, self.kept, context)
        return self._slots


def count_rows(decoder: Decoder, settings: ScheduleSettings) -> tuple[int, int]:
    """Return how many rows a cache has for requests, and how many for what is kept of earlier ones."""
    kept = settings.prefix_memory // count_cache_bytes(decoder.artifact, 1, settings.context)
    running = settings.running
    while kept and not decoder.fits(running + kept, settings.context, reading=1):
        kept -= 1
    while running > 1 and not decoder.fits(running, settings.context, reading=1):
        running -= 1
    return running, kept


def count_left(one: PendingGeneration) -> int:
    """Return how many tokens of a request's prompt are not computed yet."""
    return len(one.row.prompt) - one.prefilled


def describe_choice(row: Row) -> object:
    """Return what is equal of rows whose tokens can be chosen together: those that take the likeliest."""
    request = row.request
    if request.sampling.greedy and not request.sampling.processes and row.grammar is None:
        return request.logprobs, request.top_logprobs
    return id(row)
