"""The loop over steps that answers prompts: prefill, choose a token, decode, until all have ended."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from threading import Event

from ..decoding.cache_shapes import find_capacity
from ..decoding.chunk import Chunk, report_chunk
from ..decoding.decoder import Decoder, DecoderRun
from ..decoding.reuse import PromptReuse
from ..decoding.speculative import PromptLookup
from ..text.tokenizer import Tokenizer
from .beams import answer_by_beams
from .generation import Generation, make_generation
from .request import GenerationRequest
from .row import Row, choose_for_rows


class GenerationLoop:
    """Answers prompts that run together on one decoder.

    Args:
        decoder: whose graph runs.
        tokenizer: turns tokens of beams into text.
        max_length: of the context, in tokens.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, max_length: int) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.reuse = PromptReuse()

    def count_capacity(self, rows: Sequence[Row], request: GenerationRequest) -> int:
        """Return how many tokens each row of a cache has that these share."""
        if request.reuse_prompt:
            return self.max_length
        lengths = [len(row.prompt) for row in rows]
        return find_capacity(self.decoder.artifact, lengths, [row.max_left for row in rows])

    def answer(self, rows: list[Row], request: GenerationRequest) -> list[Generation]:
        """Answer prompts that run together."""
        if request.search is not None:
            return answer_by_beams(
                self.decoder,
                self.tokenizer,
                rows,
                request.search,
                request.logprobs,
                self.max_length,
                request.adapter_slot,
            )
        seconds = []
        for step_seconds in self._take_steps(rows, request):
            seconds.append(step_seconds)
            if request.on_token is not None:
                for row in rows:
                    if row.has_unreported_tokens:
                        report_chunk(row.make_chunk, row.cancel, request.on_token)
        return [make_generation(row, seconds) for row in rows]

    def make_chunks(
        self, row: Row, request: GenerationRequest, cancelled: Event
    ) -> Generator[Chunk, None, None]:
        with closing(self._take_steps([row], request)) as steps:
            while row.finish_reason is None:
                if cancelled.is_set():
                    row.cancel()
                    yield row.make_chunk()
                    return
                next(steps)
                yield report_chunk(row.make_chunk, row.cancel, request.on_token)

    def _take_steps(self, rows: list[Row], request: GenerationRequest) -> Generator[float, None, None]:
        """Decode until every row has a finish reason; yield each step's seconds."""
        if request.one_by_one:
            return self._decode_row(rows[0], request)
        return self._decode_batch(rows, request)

    def _decode_batch(self, rows: list[Row], request: GenerationRequest) -> Generator[float, None, None]:
        """Add a new token to each row at each step; yield each step's seconds."""
        run = self._start(rows, request)
        outputs = self.decoder.choose_results(len(rows), request.sampling, request.top_logprobs)
        start = time.perf_counter()
        scores = run.prefill([row.prompt for row in rows], outputs=outputs)
        going = rows  # without a finish reason
        active: list[bool] | None = None  # of all rows, those that are going; None while all are
        while True:
            chosen = choose_for_rows(going, scores if active is None else scores[active])
            del scores  # the next step's go into the same memory
            for place, row in enumerate(going):
                row.take(chosen, place)
            yield time.perf_counter() - start
            going = [row for row in going if row.finish_reason is None]
            if not going:
                for place, row in enumerate(rows):
                    row.found = run.list_found(place, row.count_read())
                return
            start = time.perf_counter()
            if len(going) < len(rows):
                active = [row.finish_reason is None for row in rows]
            scores = run.decode([row.token_ids[-1] for row in rows], active, outputs)

    def _decode_row(self, row: Row, request: GenerationRequest) -> Generator[float, None, None]:
        """Decode one row, which may reuse a cache and draft tokens; yield each step's seconds."""
        with self._start_run(row, request) as (run, row.reused):
            lookup = PromptLookup(row.history) if request.speculative else None
            drafts: list[int] = []
            outputs = self.decoder.choose_results(1, request.sampling, request.top_logprobs)
            start = time.perf_counter()
            scores = run.prefill([row.prompt[row.reused :]], outputs=outputs)
            while True:
                accepted = row.accept(drafts, scores)
                del scores  # the next step's go into the same memory
                yield time.perf_counter() - start
                if row.finish_reason is not None:
                    row.found = run.list_found(0, row.count_read())
                    return
                start = time.perf_counter()
                if lookup is not None:
                    if drafts:
                        lookup.update(accepted)
                        run.truncate(len(row.history) - 1)
                    drafts = row.propose(lookup)
                (scores,) = run.extend([row.token_ids[-1], *drafts], 1 + len(drafts), outputs)

    def _start_run(
        self, row: Row, request: GenerationRequest
    ) -> AbstractContextManager[tuple[DecoderRun, int]]:
        """Return a run of batch 1 for a row, and how many tokens of its prompt it holds."""
        if request.reuse_prompt:
            start = partial(self.decoder.start, 1, self.max_length)
            return self.reuse.run(row.history, start, request.adapter_slot)
        return nullcontext((self._start([row], request), 0))

    def _start(self, rows: Sequence[Row], request: GenerationRequest) -> DecoderRun:
        """Return a run for rows that keep nothing for a later call."""
        capacity = self.count_capacity(rows, request)
        capacity = self.decoder.widen(len(rows), capacity, self.max_length)
        return self.decoder.start(len(rows), capacity, adapters=[request.adapter_slot] * len(rows))
