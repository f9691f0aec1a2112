"""Text in, text out, by an encoder-decoder: tokenize, encode and search; and its cross-attention.

B sources of a batch, L layers, H heads, S source tokens, T target tokens
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import TYPE_CHECKING, overload

import numpy as np

from ..backends.backend import Backend, LoadRequest
from ..bundle.bundle import Bundle
from ..bundle.defaults import GenerationDefaults
from ..bundle.manifest import Artifact
from ..decoding.beam import BeamSearch, Hypothesis, Search, make_search
from ..decoding.cache_shapes import count_cache_bytes
from ..decoding.chunk import Chunk, OnToken, TextStream
from ..decoding.decoder import Decoder, DecoderRun
from ..errors import ClosedError, InputError, ManifestError
from ..memory_budget import MemoryBudget
from ..opening import check_weights, choose_length, count_weight_bytes, open_programs
from ..options import BatchTranslationOptions, TranslationOptions, check_batch_size, check_options
from ..progress import Progress
from ..scheduling.batched_model import QUEUE_SIZE, BatchedModel, refuse_options
from ..scheduling.batcher import Batcher, BatchSettings, PendingResults
from ..text.batching import group_by_length
from ..text.reading import check_each, check_text, count_read_ahead, run_in_chunks, run_one_or_all
from ..text.tokenizer import Tokenizer
from .results import Alignment, Candidate, Translation, TranslationTimings
from .row import TranslationRow
from .source_encoder import SourceEncoder, check_same_export
from .sources import Source, SourceReader, open_tokenizers

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

NOT_OF_THE_SEARCH = ("truncation", "parse_special", "on_token", "batch_size", "progress")
TURN_TOKENS = 512  # of sources that are translated to their ends before others have their turn
WAYS_OUT = {  # of options that do not go with requests that share an engine
    "on_token": "use translate or stream",
    "progress": "a callback of the future that it returns tells when all are done",
}


@dataclass(frozen=True)
class BatchKind:
    """What is equal of texts that are translated together: their search, and how many at most."""

    search: Search
    max_batch: int


class Translator(BatchedModel):
    """An encoder-decoder of a bundle, ready to translate. Make one with `Translator.load`.

    Safe to use from several threads: their steps take turns. Close it, or use it as a context manager.
    """

    _TASK = "translation"
    _TURN_TOKENS = TURN_TOKENS

    def __init__(
        self,
        encoder: SourceEncoder,
        decoder: Decoder,
        tokenizers: tuple[Tokenizer, Tokenizer],
        defaults: GenerationDefaults,
        *,
        max_length: int,
    ) -> None:
        assert defaults.decoder_start is not None and defaults.source_eos is not None  # load() sees to it
        self.encoder = encoder
        self.decoder = decoder
        self.source_tokenizer, self.target_tokenizer = tokenizers
        self.defaults = defaults
        self.start = defaults.decoder_start
        self.source_eos = defaults.source_eos
        self.max_length = max_length
        settings = BatchSettings(queue_size=QUEUE_SIZE, turn=TURN_TOKENS)
        self._batcher: Batcher[Source, Translation, Translation] = Batcher(
            lambda kind, sources: self._translate_all(sources, kind), len, settings
        )

    @classmethod
    def _open(cls, bundle: Bundle, engine: Backend, request: LoadRequest) -> Self:
        manifest = bundle.manifest
        defaults = manifest.generation
        if defaults is None or None in (defaults.decoder_start, defaults.source_eos):
            raise ManifestError(
                f"{bundle.folder}: a translation's generation needs decoder_start and source_eos"
            )
        decoder = engine.artifact(bundle, "decoder", request.precision)
        encoder = engine.artifact(bundle, "encoder", decoder.precision)
        max_length = choose_length(bundle, request.max_length, decoder, encoder)
        check_same_export(bundle, encoder, decoder)
        weight_bytes = count_weight_bytes(manifest, encoder, decoder)
        check_weights(weight_bytes, request.memory_limit)
        with open_programs(engine, bundle, encoder, decoder) as programs:
            tokenizers = open_tokenizers(bundle)
        return cls(
            SourceEncoder(programs[0], encoder, decoder),
            Decoder(programs[1], decoder, MemoryBudget(request.memory_limit, weight_bytes)),
            tokenizers,
            defaults,
            max_length=max_length,
        )

    @property
    def artifact(self) -> Artifact:
        """The decoder's graph."""
        return self.decoder.artifact

    @property
    def languages(self) -> tuple[str, ...]:
        """The target languages of a model that has several, such as ">>fra<<": a text begins with one."""
        return self.source_tokenizer.language_codes

    @overload
    def translate(  # type: ignore[overload-overlap]  # a str is no iterable of texts here
        self, texts: str, **options: Unpack[BatchTranslationOptions]
    ) -> Translation: ...
    @overload
    def translate(
        self, texts: Iterable[str], **options: Unpack[BatchTranslationOptions]
    ) -> list[Translation]: ...
    def translate(
        self, texts: str | Iterable[str], **options: Unpack[BatchTranslationOptions]
    ) -> Translation | list[Translation]:
        """Translate one text, or each of several.

        Args:
            texts: one text, or several; those of similar length run together.
            **options: see `BatchTranslationOptions`: what they mean in transformers, and as the checkpoint
                says unless given.

        Raises:
            InputError: an option or a text that cannot be used; nothing has run yet of its thousand texts.
            ContextLengthError: a text is longer than the model's source, and truncation=None.
            MemoryLimitError: the cache does not fit `memory_limit`.

        Example:
            >>> model.translate("the 3rd of May, 1998").text
            '1998-05-03'
        """
        return run_one_or_all(texts, lambda many: self.iterate(many, **options))

    def iterate(
        self, texts: Iterable[str], **options: Unpack[BatchTranslationOptions]
    ) -> Iterator[Translation]:
        """Translate any number of texts: results come in order, and never all of them are held.

        Each result is there as soon as its batch, and those of the texts before it, are computed. At most
        1,024 texts are read ahead, or 8 batches of a `batch_size`, and none with batch_size=1. The arguments
        are `translate`'s.
        """
        search = self._make_search(options)
        on_token = options.get("on_token")
        reader = self._make_reader(options)
        batch_size = options.get("batch_size")
        kind = self._make_kind(search, batch_size)
        checked = check_each(texts, check_text)
        report = Progress(options.get("progress", False))

        def run_chunk(done: int, chunk: Sequence[str]) -> Iterator[dict[int, Translation]]:
            yield from self._translate_all(reader.read_all(chunk, done), kind, done, on_token)

        def run() -> Iterator[Translation]:
            yield from run_in_chunks(checked, count_read_ahead(batch_size), report, run_chunk)
            reader.report()

        return run()

    def submit(
        self,
        texts: Iterable[str],
        *,
        client: str = "",
        timeout: float | None = None,
        **options: Unpack[BatchTranslationOptions],
    ) -> PendingResults[Translation]:
        """Let the engine translate texts beside those of other callers, and return at once.

        Texts are read and tokenized in the caller's thread; the engine runs in one of its own. Texts with the
        same options and of similar length are translated together, and to their ends before others have
        their turn. Results are those of `translate`. `Future.cancel` ends a request at the next turn.

        Args:
            texts: several texts.
            client: whose request it is: where requests wait, clients take turns.
            timeout: seconds after which a request that still waits fails with a DeadlineError.
            **options: see `BatchTranslationOptions`; without on_token and progress.

        Raises:
            InputError: as `translate`.
            QueueFullError: too many requests wait.
        """
        refuse_options(options, WAYS_OUT)
        search = self._make_search(options)
        kind = self._make_kind(search, options.get("batch_size"))
        reader = self._make_reader(options)
        sources = reader.read_all(check_each(texts, check_text))
        reader.report()
        self._limit_batch(search, max(map(len, sources), default=1), 1)
        return self._batcher.submit(kind, sources, client=client, timeout=timeout)

    def stream(self, text: str, **options: Unpack[TranslationOptions]) -> TextStream:
        """Translate one text greedily, a chunk as soon as it is there; `translate`'s options, but for beams.

        A chunk's text never ends inside a character; all of them joined are the text of
        `translate(num_beams=1)`. Chunks have no log-probabilities. May be abandoned at any point.

        Example:
            >>> for chunk in model.stream("the 3rd of May, 1998"):
            ...     print(chunk, end="", flush=True)
        """
        search = self._make_search(options, greedy=True)
        if search.num_beams != 1:
            raise InputError(f"stream is greedy: num_beams={search.num_beams} must be 1; use translate")
        on_token = options.get("on_token")
        reader = self._make_reader(options)
        source = reader.read(check_text(text))
        reader.report()
        self._limit_batch(search, len(source.tokens), 1)
        return TextStream(lambda cancelled: self._make_chunks(source, search, on_token, cancelled))

    def align(self, text: str, **options: Unpack[TranslationOptions]) -> Alignment:
        """Return what each token of a text's translation looked at.

        Args:
            text: one text.
            **options: see `TranslationOptions`.

        Raises:
            InputError: the bundle's graph does not give its attention, which needs an export with
                `--outputs cross_attentions`.
        """
        outputs = [s.name for s in self.artifact.outputs if s.role.startswith("cross_attention.")]
        if not outputs:
            raise InputError(
                "this bundle does not give its attention; export it again with --outputs cross_attentions"
            )
        check_options(options, TranslationOptions)
        source = self._make_reader(options).read(check_text(text)).tokens
        target = self.translate(text, **options).token_ids
        run = self.decoder.start(1, len(target), self.encoder.prepare([source]))
        ids = np.asarray([[self.start, *target[:-1]]], np.int64)
        results = run.run_graph(ids, np.ones_like(ids, bool), [0], outputs)
        return Alignment(
            tuple(self.source_tokenizer.spell_all(source)),
            tuple(self.target_tokenizer.spell_all(list(target))),
            np.concatenate([results[name] for name in outputs]).astype(np.float32),
        )

    def count_tokens(self, text: str, *, parse_special: bool = False) -> int:
        """Return how many tokens the model reads of a text, those that begin and end it included."""
        tokens = self.source_tokenizer.encode(text, parse_special=parse_special)
        return len(self.defaults.prefix) + len(tokens) + 1

    def close(self) -> None:
        """Free the engine. Later calls raise ClosedError; closing twice is fine."""
        self.encoder.close()
        self.decoder.close()  # what runs ends with the step that it is at
        self._batcher.close()

    def _make_reader(self, options: TranslationOptions) -> SourceReader:
        return SourceReader(
            self.source_tokenizer,
            self.defaults,
            limit=min(self.max_length, self.encoder.artifact.axis("tokens").max),
            truncation=options.get("truncation"),
            parse_special=options.get("parse_special", False),
        )

    def _make_search(self, options: TranslationOptions, *, greedy: bool = False) -> Search:
        """Check the options; `greedy` is of one text, without beams unless the caller asks for them."""
        if self.decoder.closed:
            raise ClosedError
        check_options(options, TranslationOptions if greedy else BatchTranslationOptions)
        room = min(self.max_length, self.decoder.artifact.axis("tokens").max)
        usual = self.defaults.max_new_tokens or room
        given = {name: value for name, value in options.items() if name not in NOT_OF_THE_SEARCH}
        if greedy and given.get("num_beams") is None:
            given["num_beams"] = 1
        search = make_search(replace(self.defaults, max_new_tokens=min(usual, room)), **given)
        self.decoder.check_beams(search.num_beams)
        if search.max_new_tokens > room:
            raise InputError(f"max_new_tokens={search.max_new_tokens} is more than the model's {room}")
        on_token = options.get("on_token")
        if on_token is not None and not callable(on_token):
            raise InputError(f"on_token={on_token!r:.80} must be a function that takes a chunk, or None")
        if on_token is not None and search.num_beams > 1:
            raise InputError(
                f"on_token does not go with num_beams={search.num_beams}: of beams it is known at the end"
                " which one is the translation; give num_beams=1, or leave it out"
            )
        return search

    def _make_kind(self, search: Search, batch_size: int | None) -> BatchKind:
        """Check how many texts may run together: each takes num_beams rows of the decoder."""
        rows = check_batch_size(batch_size, self.encoder.max_batch)
        return BatchKind(search, min(rows, self.decoder.artifact.axis("batch").max // search.num_beams))

    def _start_run(self, sources: Sequence[Sequence[int]], search: Search) -> DecoderRun:
        rows = len(sources) * search.num_beams
        return self.decoder.start(rows, search.max_new_tokens, self.encoder.prepare(sources))

    def _translate_all(
        self, sources: Sequence[Source], kind: BatchKind, first: int = 0, on_token: OnToken | None = None
    ) -> Iterator[dict[int, Translation]]:
        """Yield the translations of each batch by their number, that of the first source being `first`."""
        lengths = [len(source) for source in sources]
        groups = group_by_length(lengths, self._limit_batch(kind.search, max(lengths), kind.max_batch))
        for group in sorted(groups, key=min):  # what was read first is computed first
            yield self._translate_batch({first + i: sources[i] for i in group}, kind.search, on_token)

    def _translate_batch(
        self, sources: Mapping[int, Source], search: Search, on_token: OnToken | None
    ) -> dict[int, Translation]:
        """Translate texts that run together, by their number in the call."""
        rows = [
            TranslationRow(self.target_tokenizer, len(source.tokens), row=row, number=number)
            for row, (number, source) in enumerate(sources.items())
        ]
        beams = BeamSearch([[self.start]] * len(sources), search)
        start = time.perf_counter()
        run = self._start_run([source.tokens for source in sources.values()], search)
        encode = time.perf_counter() - start
        decode = 0.0
        while not beams.done:
            start = time.perf_counter()
            take_step(run, beams)
            decode += time.perf_counter() - start
            if on_token is not None:
                for row in rows:
                    if row.finish_reason is None:
                        row.report(beams, on_token)
        hypotheses = beams.list_hypotheses()
        tokens = sum(len(best[0].token_ids) for best in hypotheses)
        timings = TranslationTimings(encode * 1e3, decode * 1e3, tokens / (encode + decode))
        translations = {}
        for (number, source), best_hypotheses in zip(sources.items(), hypotheses, strict=True):
            candidates = tuple(self._make_candidate(hypothesis) for hypothesis in best_hypotheses)
            best = candidates[0]
            translations[number] = Translation(
                text=best.text,
                token_ids=best.token_ids,
                score=best.score,
                finish_reason=best.finish_reason,
                candidates=candidates,
                timings=timings,
                dropped=source.dropped,
            )
        return translations

    def _make_candidate(self, hypothesis: Hypothesis) -> Candidate:
        text = self.target_tokenizer.decode_known(hypothesis.token_ids)
        return Candidate(text, hypothesis.token_ids, hypothesis.score, hypothesis.finish_reason)

    def _make_chunks(
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
                run = self._start_run([source.tokens], search)
            take_step(run, beams)
            yield row.report(beams, on_token)

    def _limit_batch(self, search: Search, source_tokens: int, limit: int) -> int:
        """Return how many sources of a length, `limit` at most, fit memory_limit; refuse where none does."""
        rows = search.num_beams
        source = self.encoder.count_context_bytes(1, source_tokens)
        self.decoder.check_memory(rows, search.max_new_tokens, source)
        available = self.decoder.budget.count_available()
        if available is None:
            return limit
        needed = count_cache_bytes(self.artifact, rows, search.max_new_tokens) + source
        return min(limit, available // needed)


def take_step(run: DecoderRun, beams: BeamSearch) -> None:
    """Feed a search's tokens to a decoder, and the decoder's logits to the search."""
    copies = beams.advance(run.decode(beams.tokens))
    if not beams.done:
        run.copy_rows(copies)
