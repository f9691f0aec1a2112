"""The loop over steps that translates sources: encode, search, and what the tokens looked at.

B sources of a batch, L layers, H heads, S source tokens, T target tokens
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Event

import numpy as np

from ..decoding.beam import BeamSearch, Hypothesis, Search
from ..decoding.chunk import Chunk, OnToken
from ..decoding.decoder import Decoder, DecoderRun
from ..scheduling.batcher import IsWanted
from ..text.batching import group_by_length
from ..text.tokenizer import Tokenizer
from .results import Alignment, Candidate, Translation, TranslationTimings
from .row import TranslationRow
from .source_encoder import SourceEncoder
from .sources import Source


@dataclass(frozen=True)
class BatchKind:
    """What is equal of texts that are translated together.

    Attributes:
        search: how each is searched.
        max_batch: how many at most.
        alignment: whether each translation says what its tokens looked at.
    """

    search: Search
    max_batch: int
    alignment: bool


class TranslationLoop:
    """Translates sources that run together.

    Args:
        encoder: computes what the decoder reads of a source.
        decoder: whose graph runs.
        tokenizers: of the source and of the target.
        start: the token that the decoder begins with.
    """

    def __init__(
        self, encoder: SourceEncoder, decoder: Decoder, tokenizers: tuple[Tokenizer, Tokenizer], start: int
    ) -> None:
        self.encoder = encoder
        self.decoder = decoder
        self.source_tokenizer, self.target_tokenizer = tokenizers
        self.start = start
        # The outputs that give the attention of each layer; a bundle need not have them.
        self.attentions = [
            spec.name for spec in decoder.artifact.outputs if spec.role.startswith("cross_attention.")
        ]

    def translate_all(
        self,
        sources: Sequence[Source],
        kind: BatchKind,
        first: int = 0,
        on_token: OnToken | None = None,
        is_wanted: IsWanted = lambda number: True,
    ) -> Iterator[dict[int, Translation]]:
        """Yield the translations of each batch by their number, that of the first source being `first`.

        Sources that are not wanted any more are left out; each step asks for them.
        """
        lengths = [len(source) for source in sources]
        groups = group_by_length(lengths, self.limit_batch(kind.search, max(lengths), kind.max_batch))
        for group in sorted(groups, key=min):  # what was read first is computed first
            wanted = {first + i: sources[i] for i in group if is_wanted(first + i)}
            if wanted:
                yield self.translate_batch(wanted, kind, on_token, is_wanted)

    def translate_batch(
        self, sources: Mapping[int, Source], kind: BatchKind, on_token: OnToken | None, is_wanted: IsWanted
    ) -> dict[int, Translation]:
        """Translate texts that run together, by their number in the call."""
        rows = [
            TranslationRow(self.target_tokenizer, len(source.tokens), row=row, number=number)
            for row, (number, source) in enumerate(sources.items())
        ]
        beams = BeamSearch([[self.start]] * len(sources), kind.search)
        start = time.perf_counter()
        run = self.start_run([source.tokens for source in sources.values()], kind.search)
        encode = time.perf_counter() - start
        decode = 0.0
        while not beams.done:
            start = time.perf_counter()
            take_step(run, beams)
            decode += time.perf_counter() - start
            for row in rows:
                if on_token is not None and row.finish_reason is None:
                    row.report(beams, on_token)
                if not is_wanted(row.number):
                    beams.drop(row.row)
        del run  # its cache, before alignments have theirs
        hypotheses = beams.list_hypotheses()
        tokens = sum(len(best[0].token_ids) for best in hypotheses if best)
        timings = TranslationTimings(encode * 1e3, decode * 1e3, tokens / (encode + decode))
        return {
            number: self.make_translation(source, best_hypotheses, timings, kind.alignment)
            for (number, source), best_hypotheses in zip(sources.items(), hypotheses, strict=True)
            if best_hypotheses
        }

    def make_translation(
        self, source: Source, hypotheses: Sequence[Hypothesis], timings: TranslationTimings, alignment: bool
    ) -> Translation:
        """Return the result of a source's search."""
        candidates = tuple(self.make_candidate(hypothesis) for hypothesis in hypotheses)
        best = candidates[0]
        return Translation(
            text=best.text,
            token_ids=best.token_ids,
            score=best.score,
            finish_reason=best.finish_reason,
            candidates=candidates,
            timings=timings,
            dropped=source.dropped,
            alignment=self.align(source.tokens, best.token_ids) if alignment else None,
        )

    def make_candidate(self, hypothesis: Hypothesis) -> Candidate:
        """Return a result of a search as text."""
        text = self.target_tokenizer.decode_known(hypothesis.token_ids)
        return Candidate(text, hypothesis.token_ids, hypothesis.score, hypothesis.finish_reason)

    def align(self, source: Sequence[int], target: Sequence[int]) -> Alignment:
        """Return what each token of a translation looked at, in one step over all of them."""
        run = self.decoder.start(1, len(target), self.encoder.prepare([source]), reading=len(target))
        ids = np.asarray([[self.start, *target[:-1]]], np.int64)
        results = run.run_graph(ids, np.ones_like(ids, bool), [0], self.attentions)
        looks = [results[name][:, :, : len(target), : len(source)] for name in self.attentions]
        return Alignment(
            tuple(self.source_tokenizer.spell_all(list(source))),
            tuple(self.target_tokenizer.spell_all(list(target))),
            np.concatenate(looks).astype(np.float32),
        )

    def make_chunks(
        self, source: Source, search: Search, on_token: OnToken | None, cancelled: Event
    ) -> Generator[Chunk, None, None]:
        """Yield the chunks of a greedy translation; the last one has the finish reason."""
        row = TranslationRow(self.target_tokenizer, len(source.tokens))
        beams = BeamSearch([[self.start]], search)
        run: DecoderRun | None = None
        while row.finish_reason is None:
            if cancelled.is_set():
                beams.cancel(0)
                yield row.make_chunk(beams)
                return
            if run is None:
                run = self.start_run([source.tokens], search)
            take_step(run, beams)
            yield row.report(beams, on_token)

    def start_run(self, sources: Sequence[Sequence[int]], search: Search) -> DecoderRun:
        """Return a run whose rows are the beams of some sources."""
        rows = len(sources) * search.num_beams
        capacity = self.decoder.widen(rows, search.max_new_tokens)
        return self.decoder.start(rows, capacity, self.encoder.prepare(sources))

    def limit_batch(self, search: Search, source_tokens: int, limit: int) -> int:
        """Return how many sources of a length, `limit` at most, fit memory_limit; refuse where none does."""
        rows = search.num_beams
        source = self.encoder.count_context_bytes(1, source_tokens)
        self.decoder.check_memory(rows, search.max_new_tokens, source)
        available = self.decoder.budget.count_available()
        if available is None:
            return limit
        needed = self.decoder.count_bytes(rows, search.max_new_tokens) + source
        return min(limit, available // needed)


def take_step(run: DecoderRun, beams: BeamSearch) -> None:
    """Feed a search's tokens to a decoder, and the decoder's logits to the search."""
    copies = beams.advance(run.decode(beams.tokens))
    if copies and not beams.done:
        run.copy_rows(copies)
