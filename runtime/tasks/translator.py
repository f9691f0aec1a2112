"""Text in, text out, by an encoder-decoder: tokenize, encode, search, and look at what it looked at.

B sources of a batch, L layers, H heads, S source tokens, T target tokens
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, overload

import numpy as np

from ..backends.backend import Array
from ..bundle.defaults import GenerationDefaults
from ..bundle.manifest import Artifact
from ..decoding.beam import BeamSearch, Hypothesis, Search, search_of
from ..decoding.cache import cache_bytes
from ..decoding.decoder import Decoder
from ..decoding.source import SourceEncoder
from ..encoding.batching import batches
from ..errors import ClosedError, ContextLengthError, InputError, MemoryLimitError
from ..text.tokenizer import Tokenizer
from .closing import Closing
from .reading import check_text, checked, chunks

CHARACTERS_PER_TOKEN = 256  # at least as many as any token has; longer texts are not even tokenized
OPTIONS = (
    *("num_beams", "length_penalty", "early_stopping", "n_best", "max_new_tokens"),
    *("min_new_tokens", "no_repeat_ngram_size"),
)


@dataclass(frozen=True)
class TranslationTimings:
    """Where a batch's time went; its texts share one clock.

    Attributes:
        encode_ms: the sources.
        decode_ms: all steps of the search.
        tokens_per_s: new tokens of the whole batch over both.
    """

    encode_ms: float
    decode_ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class Candidate:
    """One of several translations of a text; the fields are `Translation`'s."""

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: str


@dataclass(frozen=True)
class Translation:
    """What a text was translated to.

    Attributes:
        text: the best translation, without special tokens.
        token_ids: its tokens, the end token included.
        score: the sum of its tokens' log-probabilities / their number ** length_penalty.
        finish_reason: "eos" or "length" (max_new_tokens).
        candidates: the n best, this one first.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: str
    candidates: tuple[Candidate, ...]
    timings: TranslationTimings

    def to_json(self) -> dict[str, Any]:
        """The fields of `planforge run --json`."""
        return asdict(self)


@dataclass(frozen=True)
class Alignment:
    """How much each target token looked at each source token.

    Attributes:
        source: the source's tokens as text, S of them.
        target: the translation's tokens as text, T of them.
        weights: (L, H, T, S) float32; what a target token looked at while it was chosen. They add up to 1.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: Array

    def averaged(self, layer: int | None = None, head: int | None = None) -> Array:
        """(T, S) of one layer and head, or the average over all.

        Raises:
            InputError: no such layer or head.
        """
        layers, heads = self.weights.shape[:2]
        chosen = self.weights
        if layer is not None:
            chosen = chosen[[checked_index("layer", layer, layers)]]
        if head is not None:
            chosen = chosen[:, [checked_index("head", head, heads)]]
        average: Array = chosen.mean((0, 1))
        return average


def checked_index(name: str, value: int, count: int) -> int:
    if type(value) is not int or not 0 <= value < count:
        raise InputError(f"{name}={value!r} must be a whole number from 0 to {count - 1}, or None for all")
    return value


class Translator(Closing):
    """An encoder-decoder of a bundle, ready to translate. Make one with `planforge.runtime.load`.

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
    def translate(self, texts: str, **options: Any) -> Translation: ...
    @overload
    def translate(self, texts: Iterable[str], **options: Any) -> list[Translation]: ...

    def translate(self, texts: str | Iterable[str], **options: Any) -> Translation | list[Translation]:
        """Translates one text, or each of several.

        Args:
            texts: one text, or several; those of similar length run together.
            **options: num_beams (1 is greedy), length_penalty, early_stopping (False, True or "never"),
                n_best (num_beams is at least as many unless it is given), no_repeat_ngram_size,
                min_new_tokens, max_new_tokens: what they mean in transformers, and as the checkpoint
                says unless given.
                parse_special=True to read special tokens such as </s> in the texts.
                progress, called with the number of texts that are done.

        Raises:
            InputError: an option or a text that cannot be used; nothing has run yet of its thousand texts.
            ContextLengthError: a text is longer than the model's source.
            MemoryLimitError: the cache does not fit `memory_limit`.

        Example:
            >>> model.translate("the 3rd of May, 1998").text
            '1998-05-03'
        """
        if isinstance(texts, str):
            return next(self.translations([texts], **options))
        return list(self.translations(texts, **options))

    def translations(
        self, texts: Iterable[str], *, progress: Callable[[int], None] | None = None, **options: Any
    ) -> Iterator[Translation]:
        """`translate` for any number of texts: results come in order, and never all of them are held."""
        parse_special = options.pop("parse_special", False)
        return self._translations(texts, self._search(options), parse_special, progress)

    def _translations(
        self,
        texts: Iterable[str],
        search: Search,
        parse_special: bool,
        progress: Callable[[int], None] | None,
    ) -> Iterator[Translation]:
        most = min(self.encoder.max_batch, self.decoder.artifact.axis("batch").max // search.num_beams)
        done = 0
        for chunk in chunks(checked(texts, check_text)):
            sources = [self._numbered_source(done + i, str(t), parse_special) for i, t in enumerate(chunk)]
            results: dict[int, Translation] = {}
            lengths = [len(source) for source in sources]
            fitting = self._most_that_fit(search, max(lengths), most)
            for group in batches(lengths, fitting):
                found = self._batch([sources[i] for i in group], search)
                results |= dict(zip(group, found, strict=True))
                if progress is not None:
                    progress(done + len(results))
            done += len(chunk)
            yield from (results[i] for i in range(len(chunk)))

    def stream(self, text: str, **options: Any) -> Iterator[str]:
        """Translates one text greedily, piece by piece; `translate`'s options, but for beams.

        A piece never ends inside a character. The pieces joined are the text of
        `translate(num_beams=1)`. May be abandoned at any point.
        """
        parse_special = options.pop("parse_special", False)
        search = self._search({**options, "num_beams": options.get("num_beams") or 1})
        if search.num_beams != 1:
            raise InputError(f"stream is greedy: num_beams={search.num_beams} must be 1; use translate")
        source = self._source(check_text(text), parse_special)
        self._most_that_fit(search, len(source), 1)
        return self._pieces(source, search)

    def align(self, text: str, **options: Any) -> Alignment:
        """What each token of a text's translation looked at; needs an export with cross_attentions.

        Args:
            text: one text.
            **options: `translate`'s.

        Raises:
            InputError: the bundle's graph does not give its attention; names the export's option.
        """
        outputs = [s.name for s in self.artifact.outputs if s.role.startswith("cross_attention.")]
        if not outputs:
            raise InputError(
                "this bundle does not give its attention; export it again with --outputs cross_attentions"
            )
        source = self._source(check_text(text), options.get("parse_special", False))
        target = self.translate(text, **options).token_ids
        run = self.decoder.start(1, len(target), self.encoder.encode([source]))
        ids = np.asarray([[self.start, *target[:-1]]], np.int64)
        results = run.results(ids, np.ones_like(ids, bool), [0], outputs)
        return Alignment(
            tuple(self.source_tokenizer.spellings(source)),
            tuple(self.target_tokenizer.spellings(list(target))),
            np.concatenate([results[name] for name in outputs]).astype(np.float32),
        )

    def count_tokens(self, text: str, parse_special: bool = False) -> int:
        """How many tokens the model reads of a text, those that begin and end it included."""
        tokens = self.source_tokenizer.encode(text, parse_special=parse_special)
        return len(self.defaults.prefix) + len(tokens) + 1

    def close(self) -> None:
        """Frees the engine. Later calls raise ClosedError; closing twice is fine."""
        self.encoder.close()
        self.decoder.close()

    def _search(self, options: dict[str, Any]) -> Search:
        """Checks the options, before anything runs."""
        if self.decoder.closed:
            raise ClosedError("the model was closed; load() it again")
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise InputError(f"unknown option {unknown}; there are {', '.join(OPTIONS)}, parse_special")
        most = min(self.max_length, self.decoder.artifact.axis("tokens").max)
        usual = self.defaults.max_new_tokens or most
        search = search_of(replace(self.defaults, max_new_tokens=min(usual, most)), **options)
        rows = self.decoder.artifact.axis("batch").max
        if search.num_beams > rows:
            raise InputError(
                f"num_beams={search.num_beams} is more than the {rows} that this bundle allows; ask for"
                " fewer, or export it again with a larger max_batch"
            )
        if search.max_new_tokens > most:
            raise InputError(f"max_new_tokens={search.max_new_tokens} is more than the model's {most}")
        return search

    def _numbered_source(self, number: int, text: str, parse_special: bool) -> list[int]:
        """`_source` of one of several texts, which errors name."""
        try:
            return self._source(text, parse_special)
        except ContextLengthError as error:
            message = f"texts[{number}]: {error}"
            raise ContextLengthError(message, tokens=error.tokens, limit=error.limit) from error
        except InputError as error:
            raise InputError(f"texts[{number}]: {error}") from error

    def _source(self, text: str, parse_special: bool) -> list[int]:
        limit = min(self.max_length, self.encoder.artifact.axis("tokens").max)
        if len(text) > CHARACTERS_PER_TOKEN * limit:
            raise ContextLengthError(
                f"a text of {len(text)} characters is more than the {limit} tokens that the model reads."
                " Translate it in parts, such as sentences",
                tokens=len(text) // CHARACTERS_PER_TOKEN,
                limit=limit,
            )
        tokens = self.source_tokenizer.encode(text, parse_special=parse_special)
        if not tokens:
            raise InputError("a text to translate is empty; leave it out")
        source = [*self.defaults.prefix, *tokens, self.source_eos]
        if len(source) > limit:
            raise ContextLengthError(
                f"the text {text[:40]!r}... has {len(source)} tokens, the end token included; the model"
                f" reads {limit}. Translate it in parts, such as sentences",
                tokens=len(source),
                limit=limit,
            )
        return source

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

    def _batch(self, sources: Sequence[Sequence[int]], search: Search) -> list[Translation]:
        steps = list(self._steps(sources, search))
        hypotheses = steps[-1][0].hypotheses()
        encode, decode = steps[0][1], sum(seconds for _, seconds in steps[1:])
        tokens = sum(len(best[0].token_ids) for best in hypotheses)
        timings = TranslationTimings(encode * 1e3, decode * 1e3, tokens / (encode + decode))
        found = []
        for of_source in hypotheses:
            candidates = tuple(self._candidate(hypothesis) for hypothesis in of_source)
            best = candidates[0]
            fields = (best.text, best.token_ids, best.score, best.finish_reason)
            found.append(Translation(*fields, candidates, timings))
        return found

    def _candidate(self, hypothesis: Hypothesis) -> Candidate:
        text = self.target_tokenizer.decode_known(hypothesis.token_ids)
        return Candidate(text, hypothesis.token_ids, hypothesis.score, hypothesis.finish_reason)

    def _pieces(self, source: Sequence[int], search: Search) -> Iterator[str]:
        tokenizer = self.target_tokenizer
        stream, shown = tokenizer.stream(), 0
        for beams, _ in self._steps([source], search):
            tokens = beams.hypotheses()[0][0].token_ids if beams.done else beams.histories[0][1:]
            for token in tokens[shown:]:
                if token < tokenizer.vocab_size and (piece := stream.push(token)):
                    yield piece
            shown = len(tokens)
        if rest := stream.finish():
            yield rest

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
