"""Text in, text out: tokenize, prefill, decode token by token, and stop for a stated reason."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from ..bundle.defaults import GenerationDefaults
from ..bundle.manifest import Artifact
from ..decoding.cache import cache_bytes, capacity_for
from ..decoding.candidates import choose_tokens, results_for
from ..decoding.decoder import Decoder, DecoderRun
from ..decoding.reuse import PromptReuse
from ..decoding.sampling import Sampling, row_generators, token_logprobs
from ..decoding.speculative import PromptLookup
from ..errors import ClosedError, ContextLengthError, InputError, MemoryLimitError
from ..text.chat import Chat, Message
from ..text.tokenizer import Tokenizer
from .closing import Closing
from .generation import Generation, generation
from .generation_row import Asked, Row

log = logging.getLogger("planforge")


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
        chat: Chat | None = None,
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.max_length = max_length
        self.memory_limit = memory_limit
        self.weight_bytes = weight_bytes
        self.max_batch = decoder.artifact.axis("batch").max
        self._chat = chat
        self._reuse = PromptReuse()

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
                parse_special=True to read special tokens such as <|endoftext|> in the prompt;
                speculative="prompt-lookup" and reuse_prompt=True, below.

        speculative="prompt-lookup" is faster where the answer repeats parts of the prompt or of itself:
        what followed the newest tokens before is taken for a guess of what comes next, and one step
        verifies all of it. A guess counts only if the model, with the same options and the same draws of
        a seed, chooses that token itself, so the answer is the one without; a text without repetition
        costs next to nothing more. Engines add up in another order when a step has several tokens: where
        the logits of two tokens are equal to within that rounding (1e-5 in fp32; with int8 and int4
        weights, whose engines round activations to 8 bits too, up to that rounding's own noise), the
        other of them may be chosen, as from one machine to another.

        reuse_prompt=True keeps this prompt's and answer's keys and values when the call ends; the next
        call with reuse_prompt=True computes only what follows the tokens that both begin with: a chat that
        grows, a long instruction with another question. The cache is made for the whole context once, and
        counts for `memory_limit` (a call that needs the memory frees it). One is kept; `forget_prompt`
        frees it.

        With either of them several prompts run one after the other, as engines verify one row at a time.

        Returns:
            A `Generation`, or a list of them in the order of the prompts (none for none).

        Raises:
            InputError: an option or prompt that cannot be used.
            ContextLengthError: the prompt leaves no room in the context.
            MemoryLimitError: the cache does not fit `memory_limit`.
        """
        asked = Asked.of(max_new_tokens, options)
        rows = self._rows([prompt] if isinstance(prompt, str) else list(prompt), asked)
        generators = row_generators(asked.sampling.seed, range(len(rows)))
        size = 1 if asked.one_by_one else self.max_batch
        answers: list[Generation] = []
        for first in range(0, len(rows), size):
            batch = slice(first, first + size)
            seconds = list(self._steps(rows[batch], asked, generators[batch]))
            answers += [generation(row, seconds) for row in rows[batch]]
        return answers[0] if isinstance(prompt, str) else answers

    def stream(self, prompt: str, max_new_tokens: int = 64, **options: Any) -> Iterator[str]:
        """Continues one prompt, piece by piece; `generate`'s options.

        A piece never ends inside a character, nor holds part of a stop string. The pieces joined are
        `generate`'s text. May be abandoned at any point.
        """
        asked = Asked.of(max_new_tokens, options)
        return self._pieces(self._rows([prompt], asked), asked)

    def chat(self, messages: Sequence[Message], max_new_tokens: int = 64, **options: Any) -> Generation:
        """Answers a conversation, worded by the checkpoint's chat template; `generate`'s options.

        Special tokens that a message spells are plain text unless parse_special=True. reuse_prompt=True
        spares a conversation that grows what was computed before.

        Args:
            messages: mappings with the texts "role" ("system", "user", "assistant") and "content"; the
                template gets what else they have.

        Raises:
            InputError: also where the bundle has no chat template, or it refuses the messages.
            BackendUnavailableError: jinja2 is missing.
            BundleError: the template is unusable.
        """
        asked = Asked.of(max_new_tokens, options)
        row = self._chat_row(messages, asked)
        seconds = list(self._steps([row], asked, row_generators(asked.sampling.seed, [0])))
        return generation(row, seconds)

    def stream_chat(
        self, messages: Sequence[Message], max_new_tokens: int = 64, **options: Any
    ) -> Iterator[str]:
        """Answers a conversation as `chat` does, piece by piece as `stream` does."""
        asked = Asked.of(max_new_tokens, options)
        return self._pieces([self._chat_row(messages, asked)], asked)

    def _pieces(self, rows: list[Row], asked: Asked) -> Iterator[str]:
        shown = 0
        for _ in self._steps(rows, asked, row_generators(asked.sampling.seed, [0])):
            new = rows[0].pieces[shown:]
            shown += len(new)
            yield from filter(None, new)

    def score(self, text: str, parse_special: bool = False) -> Score:
        """The log-probability of each of the text's tokens after the first, given those before it.

        Of a model whose prompts begin with a special token, that one is the first.

        Raises:
            InputError: fewer than two tokens.
            ContextLengthError: more tokens than the context.
        """
        tokens = self._framed(self.tokenizer.encode(text, parse_special=parse_special))
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

    def forget_prompt(self) -> None:
        """Frees the cache that a call with reuse_prompt=True kept, if there is one."""
        self._reuse.drop()

    def close(self) -> None:
        """Frees the engine. Later calls raise ClosedError; closing twice is fine."""
        self.decoder.close()
        self._reuse.drop()

    def _steps(
        self, rows: list[Row], asked: Asked, generators: Sequence[np.random.Generator]
    ) -> Iterator[float]:
        """Decodes until every row has a finish reason; yields each step's seconds."""
        if asked.one_by_one:
            return self._row_steps(rows[0], asked, generators[0])
        return self._batch_steps(rows, asked.sampling, generators)

    def _batch_steps(
        self, rows: list[Row], sampling: Sampling, generators: Sequence[np.random.Generator]
    ) -> Iterator[float]:
        """A new token for each row at each step."""
        new_tokens = [row.most_left for row in rows]
        capacity = capacity_for(self.artifact, [len(row.prompt) for row in rows], new_tokens)
        self._check_memory(len(rows), capacity)
        run = self.decoder.start(len(rows), capacity)
        outputs = results_for(self.artifact, sampling)
        start = time.perf_counter()
        scores = run.prefill([row.prompt for row in rows], outputs=outputs)
        while True:
            tokens, logprobs = choose_tokens(scores, [row.history for row in rows], sampling, generators)
            for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
                if row.finish_reason is None:
                    row.add(int(token), float(logprob), self.defaults.eos)
            yield time.perf_counter() - start
            active = [row.finish_reason is None for row in rows]
            if not any(active):
                return
            start = time.perf_counter()
            scores = run.decode([int(token) for token in tokens], active, outputs)

    def _row_steps(self, row: Row, asked: Asked, generator: np.random.Generator) -> Iterator[float]:
        """One row, which may reuse a cache, and has a new token and those that were guessed at each step."""
        with self._run_of(row, asked) as (run, row.reused):
            lookup = PromptLookup(row.history) if asked.speculative else None
            drafts: list[int] = []
            outputs = results_for(self.artifact, asked.sampling)
            start = time.perf_counter()
            scores = run.prefill([row.prompt[row.reused :]], outputs=outputs)
            while True:
                accepted = row.accept(drafts, scores, asked.sampling, generator, self.defaults.eos)
                yield time.perf_counter() - start
                if row.finish_reason is not None:
                    return
                start = time.perf_counter()
                if lookup is not None:
                    if drafts:
                        lookup.learn(accepted)
                        run.truncate(len(row.history) - 1)
                    drafts = lookup.draft(row.most_left - 1)
                (scores,) = run.extend([row.history[-1], *drafts], 1 + len(drafts), outputs)

    def _run_of(self, row: Row, asked: Asked) -> AbstractContextManager[tuple[DecoderRun, int]]:
        """A run of batch 1 for a row, and how many tokens of its prompt it holds."""
        if asked.reuse_prompt:
            self._check_memory(1, self.max_length, reusing=True)
            return self._reuse.run(row.history, lambda: self.decoder.start(1, self.max_length))
        capacity = capacity_for(self.artifact, [len(row.prompt)], [row.most_left])
        self._check_memory(1, capacity)
        return nullcontext((self.decoder.start(1, capacity), 0))

    def _rows(self, prompts: Sequence[str], asked: Asked) -> list[Row]:
        """Checks every prompt before anything runs."""
        if self.decoder.closed:
            raise ClosedError("the model was closed; load() it again")
        return [self._row(self._encode(prompt, asked.parse_special), asked) for prompt in prompts]

    def _chat_row(self, messages: Sequence[Message], asked: Asked) -> Row:
        if self.decoder.closed:
            raise ClosedError("the model was closed; load() it again")
        if self._chat is None:
            raise InputError(
                "the bundle has no chat template; generate() (without --chat) takes a prompt as it is, or"
                " export again from a folder with chat_template.jinja or chat_template in"
                " tokenizer_config.json"
            )
        return self._row(self._chat.encode(messages, self.tokenizer, asked.parse_special), asked)

    def _row(self, prompt: list[int], asked: Asked) -> Row:
        tokens, cut = self._fit(prompt, asked.max_new_tokens, asked.truncate)
        return Row(self.tokenizer, tokens, cut, self.max_length - len(tokens), asked)

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
        return self._framed(tokens)

    def _framed(self, tokens: list[int]) -> list[int]:
        """Tokens behind the special ones that begin every prompt, unless they are there already."""
        prefix = list(self.defaults.prefix)
        return tokens if tokens[: len(prefix)] == prefix else prefix + tokens

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
        prefix = self.defaults.prefix[:keep]
        if tuple(tokens[: len(prefix)]) != prefix:  # a chat template may begin without it
            prefix = ()
        return [*prefix, *tokens[len(tokens) - keep + len(prefix) :]], len(tokens) - keep

    def _check_memory(self, batch: int, capacity: int, reusing: bool = False) -> None:
        """Refuses a cache that does not fit; one that is kept for reuse gives way."""
        cache = cache_bytes(self.artifact, batch, capacity)
        needed = self.weight_bytes + cache
        if self.memory_limit is None:
            return
        if self._reuse and not reusing:
            kept = cache_bytes(self.artifact, 1, self.max_length)
            if needed + kept > self.memory_limit:
                self._reuse.drop()
        if needed > self.memory_limit:
            raise MemoryLimitError(
                f"{needed / 1e6:.1f} MB are needed: {self.weight_bytes / 1e6:.1f} MB of weights and"
                f" {cache / 1e6:.1f} MB of cache ({batch} x {capacity} tokens); memory_limit is"
                f" {self.memory_limit / 1e6:.1f} MB. Generate fewer tokens or smaller batches",
                needed=needed,
                limit=self.memory_limit,
            )
