"""Text in, text out: tokenize, prefill, decode token by token, and stop for a stated reason."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, overload

import numpy as np

from ..bundle.defaults import GenerationDefaults
from ..bundle.manifest import Artifact
from ..decoding.cache import cache_bytes, capacity_for
from ..decoding.decoder import Decoder
from ..decoding.sampling import Sampling, choose, row_generators, token_logprobs
from ..errors import ClosedError, ContextLengthError, InputError, MemoryLimitError
from ..text.stream import StopStrings
from ..text.tokenizer import Tokenizer
from .closing import Closing

log = logging.getLogger("planforge")

FinishReason: TypeAlias = Literal["eos", "stop", "length", "context"]


@dataclass(frozen=True)
class Timings:
    """Where a call's time went. A batch's rows share one clock.

    Attributes:
        prefill_ms: from the tokens of the prompt to its logits.
        decode_ms: all later steps.
        tokens_per_s: new tokens of this row over both.
    """

    prefill_ms: float
    decode_ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class Generation:
    """One prompt's answer.

    Attributes:
        text: without the prompt, special tokens, or the stop string.
        token_ids: every new token, the end-of-text token included.
        finish_reason: "eos", "stop" (a stop string), "length" (max_new_tokens) or "context" (full).
        logprobs: of each new token under the model itself, before temperature and the like.
        prompt_tokens_cut: tokens that truncate="left" dropped.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...]
    timings: Timings
    prompt_tokens_cut: int = 0

    def to_json(self) -> dict[str, Any]:
        """The fields of `planforge run --json`."""
        return asdict(self)


@dataclass(frozen=True)
class Score:
    """How likely the model finds a text.

    Attributes:
        token_ids: T tokens.
        logprobs: T - 1 numbers, of each token after the first, given those before it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.total / len(self.logprobs))


class Row:
    """One prompt being answered."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], cut: int, limit: int, room: int, stop: StopStrings
    ) -> None:
        self.prompt = prompt
        self.cut = cut  # tokens that the prompt lost at its beginning
        self.history = list(prompt)  # and the answer, as it grows
        self.limit = limit
        self.room = room
        self.stop = stop
        self.stream = tokenizer.stream()
        self.vocab_size = tokenizer.vocab_size
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.pieces: list[str] = []
        self.finish_reason: FinishReason | None = None

    def add(self, token: int, logprob: float, eos: Sequence[int]) -> None:
        """Takes the next token; the last of `pieces` is the text that may be shown now."""
        self.history.append(token)
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        # A model may have more rows than its tokenizer has tokens; those beyond spell nothing.
        piece = self.stop.push(self.stream.push(token) if token < self.vocab_size else "")
        if self.stop.found is not None:
            self.finish_reason = "stop"
        elif token in eos:
            self.finish_reason = "eos"
        elif len(self.token_ids) == self.limit:
            self.finish_reason = "length"
        elif len(self.token_ids) == self.room:
            self.finish_reason = "context"
        if self.finish_reason is not None:
            if self.stop.found is None:
                piece += self.stop.push(self.stream.finish())
            if self.stop.found is not None:  # the last bytes completed one
                self.finish_reason = "stop"
            piece += self.stop.finish()
        self.pieces.append(piece)


class TextGenerator(Closing):
    """A language model of a bundle, ready to generate. Make one with `planforge.runtime.load`.

    Safe to use from several threads: their steps take turns. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        *,
        max_length: int,
        memory_limit: int | None = None,
        weight_bytes: int = 0,
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.max_length = max_length
        self.memory_limit = memory_limit
        self.weight_bytes = weight_bytes
        self.max_batch = decoder.artifact.axis("batch").max

    @property
    def artifact(self) -> Artifact:
        """The graph that runs."""
        return self.decoder.artifact

    @overload
    def generate(self, prompt: str, max_new_tokens: int = ..., **options: Any) -> Generation: ...
    @overload
    def generate(
        self, prompt: Sequence[str], max_new_tokens: int = ..., **options: Any
    ) -> list[Generation]: ...

    def generate(
        self, prompt: str | Sequence[str], max_new_tokens: int = 64, **options: Any
    ) -> Generation | list[Generation]:
        """Continues one prompt, or each of several.

        Args:
            prompt: a text, or a sequence of texts; more than the bundle's max batch run in chunks.
                Each row's answer is the one it has alone.
            max_new_tokens: at least 1. Generation that fills the context ends with "context".
            **options: temperature, top_k, top_p, repetition_penalty, seed (see `Sampling`; greedy
                when none of the first three is given); stop, a string or several that end the answer;
                truncate="left" to drop the beginning of a prompt that is too long, so that max_new_tokens
                fit, or half a context of them;
                parse_special=True to read special tokens such as <|endoftext|> in the prompt.

        Returns:
            A `Generation`, or a list of them in the order of the prompts (none for none).

        Raises:
            InputError: an option or prompt that cannot be used.
            ContextLengthError: the prompt leaves no room in the context.
            MemoryLimitError: the cache does not fit `memory_limit`.
        """
        if isinstance(prompt, str):
            return self._generate([prompt], 0, max_new_tokens, options)[0]
        prompts = list(prompt)
        chunks = range(0, len(prompts), self.max_batch)
        seed = options.pop("seed", None)
        if seed is None and len(chunks) > 1:  # one entropy for all chunks, as for one batch
            seed = int(np.random.SeedSequence().entropy)  # type: ignore[arg-type]
        return [
            answer
            for start in chunks
            for answer in self._generate(
                prompts[start : start + self.max_batch],
                start,
                max_new_tokens,
                {**options, "seed": seed},
            )
        ]

    def stream(self, prompt: str, max_new_tokens: int = 64, **options: Any) -> Iterator[str]:
        """Continues one prompt, piece by piece; `generate`'s options.

        A piece never ends inside a character, nor holds part of a stop string. The pieces joined are
        `generate`'s text. May be abandoned at any point.
        """
        rows, sampling = self._rows([prompt], max_new_tokens, dict(options))
        return self._pieces(rows, sampling)

    def _pieces(self, rows: list[Row], sampling: Sampling) -> Iterator[str]:
        for _ in self._steps(rows, sampling, 0):
            if piece := rows[0].pieces[-1]:
                yield piece

    def score(self, text: str, parse_special: bool = False) -> Score:
        """The log-probability of each of the text's tokens after the first, given those before it.

        Raises:
            InputError: fewer than two tokens.
            ContextLengthError: more tokens than the context.
        """
        tokens = self.tokenizer.encode(text, parse_special=parse_special)
        if len(tokens) < 2:
            raise InputError(f"score needs a text of at least 2 tokens, this one has {len(tokens)}")
        if len(tokens) > self.max_length:
            raise ContextLengthError(
                f"the text has {len(tokens)} tokens, the context holds {self.max_length}; score it in parts",
                tokens=len(tokens),
                limit=self.max_length,
            )
        self._check_memory(1, len(tokens))
        logprobs: list[float] = []
        for logits in self.decoder.start(1, len(tokens)).extend(tokens[:-1]):
            following = np.asarray(tokens[len(logprobs) + 1 :][: len(logits)])
            logprobs += token_logprobs(logits, following).tolist()
        return Score(tuple(tokens), tuple(logprobs))

    def count_tokens(self, text: str, parse_special: bool = False) -> int:
        """How many tokens the text has."""
        return len(self.tokenizer.encode(text, parse_special=parse_special))

    def close(self) -> None:
        """Frees the engine. Later calls raise ClosedError; closing twice is fine."""
        self.decoder.close()

    def _generate(
        self, prompts: list[str], first_row: int, max_new_tokens: int, options: dict[str, Any]
    ) -> list[Generation]:
        rows, sampling = self._rows(prompts, max_new_tokens, dict(options))
        seconds = list(self._steps(rows, sampling, first_row))
        prefill, decode = seconds[0], sum(seconds[1:])
        return [
            Generation(
                text="".join(row.pieces),
                token_ids=tuple(row.token_ids),
                finish_reason=row.finish_reason or "length",
                logprobs=tuple(row.logprobs),
                timings=Timings(prefill * 1e3, decode * 1e3, len(row.token_ids) / (prefill + decode)),
                prompt_tokens_cut=row.cut,
            )
            for row in rows
        ]

    def _steps(self, rows: list[Row], sampling: Sampling, first_row: int) -> Iterator[float]:
        """Decodes until every row has a finish reason; yields each step's seconds."""
        new_tokens = [min(row.limit, row.room) for row in rows]
        capacity = capacity_for(self.artifact, [len(row.prompt) for row in rows], new_tokens)
        self._check_memory(len(rows), capacity)
        run = self.decoder.start(len(rows), capacity)
        generators = row_generators(sampling.seed, range(first_row, first_row + len(rows)))
        start = time.perf_counter()
        logits = run.prefill([row.prompt for row in rows])
        while True:
            tokens = choose(logits, [row.history for row in rows], sampling, generators)
            logprobs = token_logprobs(logits, tokens)
            for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
                if row.finish_reason is None:
                    row.add(int(token), float(logprob), self.defaults.eos)
            yield time.perf_counter() - start
            active = [row.finish_reason is None for row in rows]
            if not any(active):
                return
            start = time.perf_counter()
            logits = run.decode([int(token) for token in tokens], active)

    def _rows(
        self, prompts: Sequence[str], max_new_tokens: int, options: dict[str, Any]
    ) -> tuple[list[Row], Sampling]:
        """Checks everything that the caller passed, before anything runs."""
        if self.decoder.closed:
            raise ClosedError("the model was closed; load() it again")
        stop = options.pop("stop", None)
        truncate = options.pop("truncate", None)
        parse_special = options.pop("parse_special", False)
        try:
            sampling = Sampling(**options)
        except TypeError as error:
            unknown = sorted(set(options) - set(Sampling.__dataclass_fields__))
            known = [*Sampling.__dataclass_fields__, "stop", "truncate", "parse_special"]
            raise InputError(f"unknown option {unknown}; there are {', '.join(known)}") from error
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise InputError(f"max_new_tokens={max_new_tokens!r} must be a whole number of at least 1")
        if truncate not in (None, "left"):
            raise InputError(f"truncate={truncate!r} must be None or 'left'")
        rows = []
        for prompt in prompts:
            tokens, cut = self._fit(self._encode(prompt, parse_special), max_new_tokens, truncate)
            room = self.max_length - len(tokens)
            rows.append(Row(self.tokenizer, tokens, cut, max_new_tokens, room, StopStrings(stop)))
        return rows, sampling

    def _encode(self, prompt: str, parse_special: bool) -> list[int]:
        if not isinstance(prompt, str):
            raise InputError(f"a prompt must be a str, not {type(prompt).__name__}")
        tokens = self.tokenizer.encode(prompt, parse_special=parse_special)
        if not tokens:
            eos = [self.tokenizer.spelling(token) for token in self.defaults.eos]
            start = (
                f"; to begin from nothing, use {eos[0]!r} with parse_special=True (--parse-special)"
                if eos
                else ""
            )
            raise InputError(f"the prompt is empty{start}")
        return tokens

    def _fit(self, tokens: list[int], max_new_tokens: int, truncate: str | None) -> tuple[list[int], int]:
        """The prompt, or its end if it is to be cut, and how many tokens were dropped."""
        if len(tokens) < self.max_length:
            return tokens, 0
        if truncate is None:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens; the context holds {self.max_length}, of which one"
                " must be left for the answer. Shorten it, or drop its beginning by"
                " truncate='left' (--truncate left)",
                tokens=len(tokens),
                limit=self.max_length - 1,
            )
        keep = self.max_length - min(max_new_tokens, self.max_length // 2)
        log.warning("the prompt has %d tokens; its first %d were dropped", len(tokens), len(tokens) - keep)
        return tokens[-keep:], len(tokens) - keep

    def _check_memory(self, batch: int, capacity: int) -> None:
        cache = cache_bytes(self.artifact, batch, capacity)
        needed = self.weight_bytes + cache
        if self.memory_limit is not None and needed > self.memory_limit:
            raise MemoryLimitError(
                f"{needed / 1e6:.1f} MB are needed: {self.weight_bytes / 1e6:.1f} MB of weights and"
                f" {cache / 1e6:.1f} MB of cache ({batch} x {capacity} tokens); memory_limit is"
                f" {self.memory_limit / 1e6:.1f} MB. Generate fewer tokens or smaller batches",
                needed=needed,
                limit=self.memory_limit,
            )
