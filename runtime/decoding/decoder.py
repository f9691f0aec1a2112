"""Prefill and decode: one long step over a prompt, then many steps of one token.

B batch, T tokens, N logit rows, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..activations import count_batch_bytes, count_logit_bytes
from ..backends.backend import Array, GraphRunner, Program
from ..backends.buckets import find_bucket
from ..bundle.manifest import Artifact
from ..errors import InputError
from ..memory_budget import Lease, MemoryBudget, Reservation, describe_fitting
from .cache_shapes import PREFILL_CHUNK, count_cache_bytes, count_step_tokens
from .caches import has_row_lengths, make_cache
from .candidates import choose_results, read_scores
from .sampling import Sampling
from .state import LOGITS, NONE_PENDING, CacheState, Context, DecoderState, PendingContext, RowState

SCORE_CHUNK = 64  # tokens per scoring step: bounds the logits' memory
NEED_LESS = "Generate fewer tokens or use shorter texts"  # to need less memory
FEWER_ROWS = "use smaller batches or fewer beams"


class Decoder(GraphRunner):
    """Runs one decoder graph. Each `DecoderRun` has a cache of its own; steps of two threads take turns.

    `config` has the model's sizes, by which a memory limit counts what a step computes.
    """

    def __init__(
        self,
        program: Program,
        artifact: Artifact,
        budget: MemoryBudget | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(program, artifact, budget)
        self.config = config or {}

    @property
    def captures_steps(self) -> bool:
        """Return whether the engine captures steps of one token, whose caches should have few shapes."""
        return self.program.captures_steps and has_row_lengths(self.artifact)

    def start(
        self,
        batch: int,
        capacity: int,
        context: PendingContext = NONE_PENDING,
        copies: int = 1,
        reading: int | None = None,
        logit_rows: int | None = None,
        adapters: Sequence[int] = (),
    ) -> DecoderRun:
        """Return a run with an empty cache for `batch` rows of up to `capacity` tokens.

        A translation's source, its context, is computed when all of the run's memory is held. The rows
        become `copies` times as many when the run is told to `expand`. `reading` of them, all by default,
        have their prompts computed in one step; of a translation so many tokens are. A step gives logits for
        `logit_rows`, by default one of each row. `adapters` has each row's slot; no row has one by default.

        Raises:
            MemoryLimitError: memory_limit, or the engine's own memory, has no room for all of it.
            ClosedError: the model was closed.
        """
        # Without the turn: others' steps must go on while this one waits.
        rows = batch * copies
        count = self.count_bytes(rows, capacity, reading or batch, logit_rows) + context.byte_count
        hint = self.suggest(rows, capacity, context.byte_count, reading or batch)
        reservation = self.budget.hold(count, name_cache(rows, capacity), hint)
        try:
            seen = context.compute()
            with self.turn():
                cache = self.make_state(batch, capacity, seen, copies)
            if adapters:
                cache.adapters[:] = adapters
        except BaseException:
            reservation.release()
            raise
        cache.lease = Lease(reservation)  # a finalizer of the cache would run before its buffers are freed
        return DecoderRun(self, cache, reservation)

    def make_state(self, batch: int, capacity: int, context: Context, copies: int) -> DecoderState:
        """Return the empty state of a run; see `start`."""
        return make_cache(self.program, self.artifact, batch, capacity, context, copies)

    def run_together(self, lengths: Sequence[int]) -> bool:
        """Return whether prompts of these lengths can: any, as the shorter ones are padded."""
        return True

    def widen(self, rows: int, capacity: int, longest: int | None = None) -> int:
        """Return a capacity of few, for each of which steps are captured, for `start`.

        It is the same where steps are not captured, where memory is short, and under a memory_limit, which
        counts with what is asked for; `longest` at most if that is given.
        """
        if not self.captures_steps or self.budget.limit is not None:
            return capacity
        wider = max(capacity, find_bucket(capacity, longest or self.artifact.axis("tokens").max))
        free = self.program.free_memory()
        return wider if free is None or count_cache_bytes(self.artifact, rows, wider) <= free else capacity

    def choose_results(self, rows: int, sampling: Sampling, top_logprobs: int = 0) -> Sequence[str]:
        """Return the results that choosing a token of each row needs."""
        # Fetching the logits of one row takes less time than choosing candidates on the GPU.
        if rows == 1 and self.captures_steps:
            return LOGITS
        return choose_results(self.artifact, sampling, top_logprobs)

    def check_beams(self, num_beams: int) -> None:
        """Refuse more beams than the graph takes rows."""
        rows = self.artifact.axis("batch").max
        if num_beams > rows:
            raise InputError(
                f"num_beams={num_beams} is more than the {rows} rows that this bundle allows; ask for fewer,"
                " or export it again for more (planforge export --max-batch)",
                option="num_beams",
            )

    def count_bytes(
        self, rows: int, capacity: int, reading: int | None = None, logit_rows: int | None = None
    ) -> int:
        """Return the bytes of a run's cache, and of its widest step's activations and logits.

        Args:
            rows: of the cache.
            capacity: tokens of each.
            reading: rows whose prompts are computed in one step; all by default.
            logit_rows: how many logits a step gives; one of each row by default.
        """
        tokens = count_step_tokens(self.artifact, reading or rows, rows, capacity)
        activations = count_batch_bytes(self.config, tokens, capacity, self.artifact.graph)
        logits = count_logit_bytes(self.artifact, max(rows, logit_rows or 0))
        return count_cache_bytes(self.artifact, rows, capacity) + activations + logits

    def check_memory(
        self, rows: int, capacity: int, context_bytes: int = 0, reading: int | None = None
    ) -> None:
        """Refuse a run that `memory_limit` has no room for even when it is alone."""
        count = self.count_bytes(rows, capacity, reading) + context_bytes
        hint = self.suggest(rows, capacity, context_bytes, reading)
        self.budget.check(count, name_cache(rows, capacity), hint)

    def suggest(self, rows: int, capacity: int, context_bytes: int = 0, reading: int | None = None) -> str:
        """Return what a caller can do whose run does not fit even when it is alone, and what would fit."""
        available = self.budget.count_available()
        need_less = f"{NEED_LESS}, or {FEWER_ROWS}" if rows > 1 else NEED_LESS

        def count(batch: int, tokens: int) -> int:
            return self.count_bytes(batch, tokens, min(batch, reading or batch)) + context_bytes

        if available is None or count(rows, capacity) <= available:
            return need_less
        fitting = describe_fitting(count, available, rows, capacity)
        if fitting:
            return f"{need_less}; {fitting}"
        return need_less if rows > 1 or context_bytes else "Not even a length of 1 would fit"

    def has_room(self, rows: int, capacity: int, reading: int | None = None) -> bool:
        """Return whether `memory_limit` has room for a run beside what other calls hold now."""
        return self.budget.has_room(self.count_bytes(rows, capacity, reading))

    def fits(self, rows: int, capacity: int, reading: int | None = None) -> bool:
        """Return whether `memory_limit` has room for a run that is alone."""
        available = self.budget.count_available()
        return available is None or self.count_bytes(rows, capacity, reading) <= available


def name_cache(rows: int, capacity: int) -> str:
    return f"a cache of {rows} x {capacity} tokens with a step's activations"


class DecoderRun:
    """One batch being decoded, whose memory is reserved as long as its cache lives.

    A step's scores of the next tokens are logits (V,) for each row, or with `outputs` from `choose_results`
    perhaps candidates (K,).
    """

    def __init__(self, decoder: Decoder, cache: DecoderState, reservation: Reservation) -> None:
        self.decoder = decoder
        self.cache = cache
        self.reservation = reservation

    def prefill(
        self, prompts: Sequence[Sequence[int]], chunk: int = PREFILL_CHUNK, outputs: Sequence[str] = LOGITS
    ) -> Array:
        """Run each row's prompt; return the logits (B, V) that follow each prompt's last token."""
        ids, valid = pad(prompts, self.decoder.artifact.padding_side)
        self.cache.check_room(ids.shape[1])
        last = [int(np.flatnonzero(row)[-1]) for row in valid]
        logits: list[Array | None] = [None] * len(prompts)
        for start in range(0, ids.shape[1], chunk):
            piece = slice(start, min(start + chunk, ids.shape[1]))
            width = piece.stop - start
            ending = [b for b, column in enumerate(last) if start <= column < piece.stop]
            rows = [b * width + last[b] - start for b in ending] or [0]  # a graph has one row at least
            out = self.step(ids[:, piece], valid[:, piece], rows, outputs)
            for b, row in zip(ending, out, strict=False):
                logits[b] = row
        return np.stack([row for row in logits if row is not None])

    def decode(
        self, tokens: Sequence[int], active: Sequence[bool] | None = None, outputs: Sequence[str] = LOGITS
    ) -> Array:
        """Run one more token per row; return the logits (B, V) that follow it.

        Rows that are not `active` have ended: they neither grow nor count any more.
        """
        ids = np.array([tokens], np.int64).T
        valid = None if active is None else np.array([active], bool).T
        return self.step(ids, valid, np.arange(len(tokens)), outputs)

    def extend(
        self, tokens: Sequence[int], chunk: int = SCORE_CHUNK, outputs: Sequence[str] = LOGITS
    ) -> Iterator[Array]:
        """Run several tokens behind the cache at batch 1; yield the logits (T, V) behind them in chunks."""
        for start in range(0, len(tokens), chunk):
            ids = np.array([tokens[start : start + chunk]], np.int64)
            yield self.step(ids, None, np.arange(ids.shape[1]), outputs)

    def extend_row(self, row: int, tokens: Sequence[int], outputs: Sequence[str] = LOGITS) -> Array:
        """Run tokens of one row of a `RowState`; return the scores (1, ...) behind the last."""
        self.reservation.use()
        with self.decoder.turn():
            return read_scores(self.rows.step_row(row, tokens, [len(tokens) - 1], outputs))

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Overwrite a row with the first `length` tokens of another one."""
        with self.decoder.turn():
            self.rows.copy_row(source, target, length)

    def set_adapter(self, row: int, adapter: int) -> None:
        """Let a row that holds nothing have an adapter; 0 is none."""
        self.cache.adapters[row] = adapter

    def is_full(self, row: int) -> bool:
        """Return whether a row of a `RowState` has no slot left."""
        return self.rows.is_full(row)

    def list_found(self, row: int, length: int) -> Sequence[Any]:
        """Return the neighbours of each chunk of a row's first tokens, where such are read."""
        return self.cache.list_found(row, length)

    @property
    def rows(self) -> RowState:
        """The cache, where its rows have lengths of their own."""
        assert isinstance(self.cache, RowState)
        return self.cache

    @property
    def tokens(self) -> CacheState:
        """The cache, whose tokens can be forgotten; a state of fixed size is none."""
        assert isinstance(self.cache, CacheState)
        return self.cache

    def find_kept(self, row: int, length: int) -> int:
        """Return `length`, or 0 where a row of a `RowState` cannot go back to so many tokens."""
        return self.rows.find_kept(row, length)

    def truncate(self, length: int) -> int:
        """Forget all but the first `length` tokens of every row, or all; see `CacheState.truncate`."""
        return self.tokens.truncate(length)

    def truncate_row(self, row: int, length: int) -> None:
        """Forget all but the first `length` tokens of a row."""
        self.tokens.truncate_row(row, length)

    def repeat(self, times: int) -> None:
        """Let the cache hold what it holds so many times; see `CacheState.repeat`."""
        with self.decoder.turn():
            self.tokens.repeat(times)

    def step(
        self,
        ids: Array,
        valid: Array | None,
        logit_rows: Sequence[int] | Array,
        outputs: Sequence[str] = LOGITS,
    ) -> Array:
        """Run the graph once; return the scores (N, ...) of `logit_rows`, flat indices into its B * T."""
        return read_scores(self.run_graph(ids, valid, logit_rows, outputs))

    def run_graph(
        self, ids: Array, valid: Array | None, logit_rows: Sequence[int] | Array, outputs: Sequence[str]
    ) -> dict[str, Array]:
        """Run the graph once; return the named results."""
        self.reservation.use()
        with self.decoder.lock:  # `turn`, without a context manager's calls
            self.decoder.check_open()
            return self.cache.step(ids, valid, np.asarray(logit_rows, np.int64), outputs)

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy rows of the cache over others, as (source, target); no target is a source."""
        with self.decoder.turn():
            self.cache.copy_rows(copies)

    def expand(self) -> None:
        """Copy each row of the cache to as many adjacent ones as `Decoder.start` left room for."""
        with self.decoder.turn():
            self.tokens.expand()


def pad(rows: Sequence[Sequence[int]], side: str, width: int = 0) -> tuple[Array, Array]:
    """Return rows of unequal length as ids (B, T) int64 and valid (B, T) bool, padded with 0 on `side`.

    T is `width`, or the longest row's length if that is more.
    """
    width = max(width, *(len(row) for row in rows))
    ids = np.zeros((len(rows), width), np.int64)
    valid = np.zeros((len(rows), width), bool)
    for b, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[b, where] = row
        valid[b, where] = True
    return ids, valid
