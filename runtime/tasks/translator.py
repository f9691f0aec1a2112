"""Text in, text out, by an encoder-decoder: tokenize, encode, search, and look at what it looked at.

B sources of a batch, L layers, H heads, S source tokens, T target tokens
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, overload

import numpy as np

from ..bundle.defaults import GenerationDefaults
from ..bundle.manifest import Artifact
from ..decoding.beam import BeamSearch, Hypothesis, Search, search_of
from ..decoding.cache import cache_bytes
from ..decoding.decoder import Decoder
from ..decoding.source import SourceEncoder
from ..encoding.batching import batches, in_reading_order
from ..errors import ClosedError, InputError, MemoryLimitError
from ..options import (
    ProgressOption,
    TranslationOptions,
    check_batch_size,
    check_options,
    option_names,
)
from ..progress import Progress
from ..text.tokenizer import Tokenizer
from .chunk import Cancellation, Chunk, TextStream, Usage
from .closing import Closing
from .reading import check_text, checked, chunks, read_ahead
from .sources import Source, SourceReader
from .translations import Alignment, Candidate, Translation, TranslationTimings

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Alignment", "Candidate", "Translation", "TranslationTimings", "Translator"]

log = logging.getLogger("planforge")


class Translator(Closing):
    """An encoder-decoder of a bundle, ready to translate. Make one with `Translator.load`.

    Safe to use from several threads: their steps take turns. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        encoder: SourceEncoder,
        decoder: Decoder,
        tokenizers: tuple[Tokenizer, Tokenizer],
        defaults: GenerationDefaults,
        *,
        max_length: int,
        memory_limit: int | None = None,
        weight_bytes: int = 0,
    ) -> None:
        assert defaults.decoder_start is not None and defaults.source_eos is not None  # load() sees to it
        self.encoder = encoder
        self.decoder = decoder
        self.source_tokenizer, self.target_tokenizer = tokenizers
        self.defaults = defaults
        self.start = defaults.decoder_start
        self.source_eos = defaults.source_eos
        self.max_length = max_length
        self.memory_limit = memory_limit
        self.weight_bytes = weight_bytes

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
        self,
        texts: str,
        *,
        batch_size: int | None = ...,
        progress: ProgressOption = ...,
        **options: Unpack[TranslationOptions],
    ) -> Translation: ...
    @overload
    def translate(
        self,
        texts: Iterable[str],
        *,
        batch_size: int | None = ...,
        progress: ProgressOption = ...,
        **options: Unpack[TranslationOptions],
    ) -> list[Translation]: ...
    def translate(
        self,
        texts: str | Iterable[str],
        *,
        batch_size: int | None = None,
        progress: ProgressOption = False,
        **options: Unpack[TranslationOptions],
    ) -> Translation | list[Translation]:
        """Translate one text, or each of several.

        Args:
            texts: one text, or several; those of similar length run together.
            batch_size: the most texts that run together; as many as the bundle allows unless given.
            progress: True counts finished texts on stderr; a callable gets their number.
            **options: see `TranslationOptions`: what they mean in transformers, and as the checkpoint says
                unless given.

        Raises:
            InputError: an option or a text that cannot be used; nothing has run yet of its thousand texts.
            ContextLengthError: a text is longer than the model's source, and truncation=None.
            MemoryLimitError: the cache does not fit `memory_limit`.

        Example:
            >>> model.translate("the 3rd of May, 1998").text
            '1998-05-03'
        """
        many = [texts] if isinstance(texts, str) else texts
        results = self.iterate(many, batch_size=batch_size, progress=progress, **options)
        if isinstance(texts, str):
            (result,) = results
            return result
        return list(results)

    def iterate(
        self,
        texts: Iterable[str],
        *,
        batch_size: int | None = None,
        progress: ProgressOption = False,
        **options: Unpack[TranslationOptions],
    ) -> Iterator[Translation]:
        """Translate any number of texts: results come in order, and never all of them are held.

        Each result is there as soon as its batch, and those of the texts before it, are computed. At most
        1,024 texts are read ahead, or 8 batches of a `batch_size`, and none with batch_size=1. The arguments
        are `translate`'s.
        """
        search = self._search(options)
        reader = self._reader(options)
        # A caller's batch_size counts texts; each takes num_beams rows of the decoder.
        rows = check_batch_size(batch_size, self.encoder.max_batch)
        most = min(rows, self.decoder.artifact.axis("batch").max // search.num_beams)
        chunked = chunks(checked(texts, check_text), read_ahead(batch_size))
        return self._results(chunked, search, reader, most, Progress(progress))

    def _results(
        self,
        chunked: Iterator[list[str]],
        search: Search,
        reader: SourceReader,
        most: int,
        progress: Progress,
    ) -> Iterator[Translation]:
        done = 0
        with progress:
            for chunk in chunked:
                sources = [reader.read(text, done + i) for i, text in enumerate(chunk)]
                lengths = [len(source.tokens) for source in sources]
                fitting = self._most_that_fit(search, max(lengths), most)
                finished: dict[int, Translation] = {}
                given = 0
                for group in in_reading_order(batches(lengths, fitting)):
                    found = self._batch([sources[i] for i in group], search)
                    finished |= dict(zip(group, found, strict=True))
                    progress(done + given + len(finished))
                    while given in finished:
                        yield finished.pop(given)
                        given += 1
                done += len(chunk)
        reader.report()

    def stream(self, text: str, **options: Unpack[TranslationOptions]) -> TextStream:
        """Translate one text greedily, a chunk as soon as it is there; `translate`'s options, but for beams.

        A chunk's text never ends inside a character; all of them joined are the text of
        `translate(num_beams=1)`. Chunks have no log-probabilities. May be abandoned at any point.

        Example:
            >>> for chunk in model.stream("the 3rd of May, 1998"):
            ...     print(chunk, end="", flush=True)
        """
        search = self._search(options, greedy=True)
        if search.num_beams != 1:
            raise InputError(f"stream is greedy: num_beams={search.num_beams} must be 1; use translate")
        reader = self._reader(options)
        source = reader.read(check_text(text))
        reader.report()
        self._most_that_fit(search, len(source.tokens), 1)
        return TextStream(lambda cancellation: self._chunks(source, search, cancellation))

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
        check_options(options, option_names(TranslationOptions))
        source = self._reader(options).read(check_text(text)).tokens
        target = self.translate(text, **options).token_ids
        run = self.decoder.start(1, len(target), self.encoder.encode([source]))
        ids = np.asarray([[self.start, *target[:-1]]], np.int64)
        results = run.results(ids, np.ones_like(ids, bool), [0], outputs)
        return Alignment(
            tuple(self.source_tokenizer.spellings(source)),
            tuple(self.target_tokenizer.spellings(list(target))),
            np.concatenate([results[name] for name in outputs]).astype(np.float32),
        )

    def count_tokens(self, text: str, *, parse_special: bool = False) -> int:
        """Return how many tokens the model reads of a text, those that begin and end it included."""
        tokens = self.source_tokenizer.encode(text, parse_special=parse_special)
        return len(self.defaults.prefix) + len(tokens) + 1

    def close(self) -> None:
        """Free the engine. Later calls raise ClosedError; closing twice is fine."""
        self.encoder.close()
        self.decoder.close()

    def _reader(self, options: TranslationOptions) -> SourceReader:
        """Return what reads this call's texts."""
        return SourceReader(
            self.source_tokenizer,
            self.defaults,
            limit=min(self.max_length, self.encoder.artifact.axis("tokens").max),
            truncation=options.get("truncation"),
            parse_special=options.get("parse_special", False),
        )

    def _search(self, options: TranslationOptions, *, greedy: bool = False) -> Search:
        """Check the options, before anything runs.

        Args:
            options: the caller's.
            greedy: search greedily unless the caller asks for beams, whatever the checkpoint says.
        """
        if self.decoder.closed:
            raise ClosedError("the model was closed; load() it again")
        known = option_names(TranslationOptions)
        check_options(options, known if greedy else (*known, "batch_size", "progress"))
        most = min(self.max_length, self.decoder.artifact.axis("tokens").max)
        usual = self.defaults.max_new_tokens or most
        given = {
            name: value for name, value in options.items() if name not in ("truncation", "parse_special")
        }
        if greedy and given.get("num_beams") is None:
            given["num_beams"] = 1
        search = search_of(replace(self.defaults, max_new_tokens=min(usual, most)), **given)
        rows = self.decoder.artifact.axis("batch").max
        if search.num_beams > rows:
            raise InputError(
                f"num_beams={search.num_beams} is more than the {rows} that this bundle allows; ask for"
                " fewer, or export it again with a larger max_batch"
            )
        if search.max_new_tokens > most:
            raise InputError(f"max_new_tokens={search.max_new_tokens} is more than the model's {most}")
        return search

    def _steps(self, sources: Sequence[Sequence[int]], search: Search) -> Iterator[tuple[BeamSearch, float]]:
        """The search after each step, and the step's seconds; first those of the encoder."""
        rows = len(sources) * search.num_beams
        start = time.perf_counter()
        context = self.encoder.encode(sources)
        beams = BeamSearch(len(sources), self.start, search)
        run = self.decoder.start(rows, search.max_new_tokens, context)
        yield beams, time.perf_counter() - start
        while not beams.done:
            start = time.perf_counter()
            copies = beams.advance(run.decode(beams.tokens))
            if not beams.done:
                run.copy_rows(copies)
            yield beams, time.perf_counter() - start

    def _batch(self, sources: Sequence[Source], search: Search) -> list[Translation]:
        steps = list(self._steps([source.tokens for source in sources], search))
        hypotheses = steps[-1][0].hypotheses()
        encode, decode = steps[0][1], sum(seconds for _, seconds in steps[1:])
        tokens = sum(len(best[0].token_ids) for best in hypotheses)
        timings = TranslationTimings(encode * 1e3, decode * 1e3, tokens / (encode + decode))
        found = []
        for source, of_source in zip(sources, hypotheses, strict=True):
            candidates = tuple(self._candidate(hypothesis) for hypothesis in of_source)
            best = candidates[0]
            translation = Translation(
                text=best.text,
                token_ids=best.token_ids,
                score=best.score,
                finish_reason=best.finish_reason,
                candidates=candidates,
                timings=timings,
                dropped=source.dropped,
            )
            found.append(translation)
        return found

    def _candidate(self, hypothesis: Hypothesis) -> Candidate:
        text = self.target_tokenizer.decode_known(hypothesis.token_ids)
        return Candidate(text, hypothesis.token_ids, hypothesis.score, hypothesis.finish_reason)

    def _chunks(
        self, source: Source, search: Search, cancellation: Cancellation
    ) -> Generator[Chunk, None, None]:
        """Yield the chunks of a greedy translation; the last one has the finish reason."""
        tokenizer = self.target_tokenizer
        text = tokenizer.stream()
        count = 0
        for beams, _ in self._steps([source.tokens], search):
            best = beams.hypotheses()[0][0] if beams.done else None
            tokens = beams.histories[0][1:] if best is None else best.token_ids
            new = tuple(int(token) for token in tokens[count:])
            count = len(tokens)
            shown = "".join(text.push(token) for token in new if token < tokenizer.vocab_size)
            usage = Usage(prompt_tokens=len(source.tokens), completion_tokens=count)
            if best is not None:
                yield Chunk(shown + text.finish(), new, (), (), best.finish_reason, usage)
                return
            if cancellation.requested:
                yield Chunk(shown + text.finish(), new, (), (), "cancelled", usage)
                return
            if new:
                yield Chunk(shown, new, (), (), None, usage)

    def _most_that_fit(self, search: Search, source_tokens: int, most: int) -> int:
        """How many sources of a length may run together.

        Raises:
            MemoryLimitError: not even one of them fits `memory_limit`.
        """
        if self.memory_limit is None:
            return most
        rows = search.num_beams
        cache = cache_bytes(self.artifact, rows, search.max_new_tokens) + self._cross_bytes(source_tokens)
        needed = self.weight_bytes + cache
        if needed > self.memory_limit:
            raise MemoryLimitError(
                f"{needed / 1e6:.1f} MB are needed: {self.weight_bytes / 1e6:.1f} MB of weights and"
                f" {cache / 1e6:.1f} MB of cache ({rows} x {search.max_new_tokens} target and"
                f" {source_tokens} source tokens); memory_limit is {self.memory_limit / 1e6:.1f} MB. Allow"
                " fewer new tokens or beams",
                needed=needed,
                limit=self.memory_limit,
            )
        return min(most, (self.memory_limit - self.weight_bytes) // cache)

    def _cross_bytes(self, source_tokens: int) -> int:
        """What the decoder reads of one source."""
        specs = [spec for spec, _ in self.encoder.reads]
        numbers = sum(int(np.prod([a for a in s.axis_names() if isinstance(a, int)])) for s in specs)
        return source_tokens * numbers * np.dtype(specs[0].dtype).itemsize
