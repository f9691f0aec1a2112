"""The state of one prompt while it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from ..backends.backend import Array
from ..decoding.candidates import Chosen, choose_tokens
from ..decoding.chunk import Chunk, FinishReason, Likeliest, TopLogprobs, Usage
from ..decoding.history import TokenHistory
from ..decoding.sampling import make_generators
from ..decoding.speculative import PromptLookup
from ..text.stream import StopStrings
from ..text.tokenizer import Tokenizer
from .grammar import Grammar
from .request import GenerationRequest


class Row:
    """One prompt being answered; `number` is its index in the call."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        prompt: list[int],  # at least one token
        cut: int,  # tokens that the prompt lost
        room: int,  # the most new tokens that the context holds behind it
        request: GenerationRequest,
        eos: Sequence[int],
        number: int,
        context: Sequence[int] = (),  # what the answer's text depends on; none where it goes on with none
        grammar: Grammar | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.number = number
        self.cut = cut
        self.reused = 0  # tokens of the prompt that were in a cache already
        self.drafted = self.accepted = 0
        self.found: Sequence[Any] = ()  # the neighbours of each complete chunk that was read
        self.history = TokenHistory(prompt)  # and the answer, as it grows
        self.request = request
        self.grammar = grammar
        (self.generator,) = make_generators(request.sampling.seed, [number])
        self.eos = frozenset(() if request.ignore_eos else eos)
        limit = request.find_limit(len(prompt))
        self.max_new_tokens = min(limit, room)
        # Why it ends at its last token: the context is full, unless less was asked for.
        self.full: Literal["length", "context"] = "length" if self.max_new_tokens == limit else "context"
        self.stop = StopStrings(request.stop)
        self.has_stop_strings = bool(request.stop)
        self.context = context
        self.stream = tokenizer.stream(context)
        self._begins = not context  # whether the next token is the first of its text
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[Likeliest] = []
        self.pieces: list[str] = []  # the text of the tokens that are decoded
        self._decoded = 0  # of `token_ids`
        self.finish_reason: FinishReason | None = None
        self._reported_tokens = 0  # those that are in chunks already
        self._reported_pieces = 0

    def count_read(self) -> int:
        """Return how many tokens the model has read: all but the last."""
        return len(self.history) - 1

    @property
    def max_left(self) -> int:
        """New tokens that may still come."""
        return self.max_new_tokens - len(self.token_ids)

    @property
    def has_unreported_tokens(self) -> bool:
        """Whether there are tokens that no chunk has yet."""
        return self._reported_tokens < len(self.token_ids)

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=len(self.prompt), completion_tokens=len(self.token_ids))

    def take(self, chosen: Chosen, place: int) -> None:
        """Take the token that was chosen at one place of a step."""
        if chosen.logprobs is not None:
            self.logprobs.append(chosen.logprobs[place])
        if chosen.likeliest is not None:
            ids, logprobs = chosen.likeliest
            self.top_logprobs.append((ids[place].copy(), logprobs[place].copy(), self._begins))
        token = chosen.tokens[place]
        if self._begins:
            self._begins = not self.tokenizer.find_context([token])
        self.history.append(token)
        self.token_ids.append(token)
        if self.grammar is not None:
            self.grammar.take(token)
        if self.has_stop_strings:
            self._decode()
        if token in self.eos:
            self._finish("eos")
        elif self.grammar is not None and self.grammar.complete:
            self._finish("stop")
        elif len(self.token_ids) == self.max_new_tokens:
            self._finish(self.full)
        elif self.stop.found is not None:
            self._finish("stop")

    def accept(self, drafts: Sequence[int], scores: Array) -> int:
        """Take tokens up to the first that is no draft or ends the row; return how many drafts were right.

        Each is chosen after those before it, with the processors and draws it would have had one at a time.
        The scores (1 + k, ...) follow the row's last token and each of k drafts.
        """
        right = 0
        for place, draft in enumerate([*drafts, None]):
            self.take(choose_for_rows([self], scores[place : place + 1]), 0)
            right += self.token_ids[-1] == draft
            if self.token_ids[-1] != draft or self.finish_reason is not None:
                break
        self.drafted += len(drafts)
        self.accepted += right
        return right

    def propose(self, lookup: PromptLookup) -> list[int]:
        """Return guesses of the next tokens: what the grammar forces, or what followed before."""
        most = self.max_left - 1
        if self.grammar is None:
            return lookup.draft(most)
        if forced := self.grammar.find_forced():
            return forced[:most]
        drafts = lookup.draft(most)
        return drafts[: self.grammar.count_allowed(drafts)]

    def _finish(self, reason: FinishReason) -> None:
        """End the answer, by a stop string where its text has one; what was held back of it counts."""
        self._decode()
        self.pieces.append(self.stop.push(self.stream.finish()) + self.stop.finish())
        self.finish_reason = reason if self.stop.found is None else "stop"

    def cancel(self) -> None:
        """End the answer as it is, unless it has ended."""
        if self.finish_reason is None:
            self._finish("cancelled")
            self.finish_reason = "cancelled"  # also where what was held back ends with a stop string

    def make_chunk(self) -> Chunk:
        """Return what came since the last chunk."""
        self._decode()
        tokens = slice(self._reported_tokens, len(self.token_ids))
        text = "".join(self.pieces[self._reported_pieces :])
        self._reported_tokens = len(self.token_ids)
        self._reported_pieces = len(self.pieces)
        return Chunk(
            text=text,
            token_ids=tuple(self.token_ids[tokens]),
            logprobs=tuple(self.logprobs[tokens]),
            top_logprobs=self.list_top_logprobs(tokens.start),
            finish_reason=self.finish_reason,
            usage=self.usage,
            index=self.number,
        )

    def _decode(self) -> None:
        """Decode the tokens that have no text yet; done when the text is read, so steps stay short."""
        for token in self.token_ids[self._decoded :]:
            self._decoded += 1  # first, so that no token is decoded twice, whatever is raised below
            # A model may have more rows than its tokenizer has tokens; those beyond spell nothing.
            if token >= self.tokenizer.vocab_size:
                continue
            if self.tokenizer.find_piece(token) is None:
                self.pieces.append(self.stop.push(self.tokenizer.spell(token), hidden=True))
                continue
            text = self.stream.push(token)
            if self.has_stop_strings:
                text += self.stream.release_bytes()
            self.pieces.append(self.stop.push(text))

    def list_top_logprobs(self, start: int) -> TopLogprobs | tuple[()]:
        """Return the likeliest tokens of the places from one on; nothing where they were not asked for."""
        if not self.request.top_logprobs:
            return ()
        return TopLogprobs(self.top_logprobs[start:], partial(spell_candidate, self.tokenizer))


def spell_candidate(tokenizer: Tokenizer, token: int, begins: bool) -> str:
    """Return what a token adds to a text, which it `begins` or not."""
    # A model may have more rows than its tokenizer has tokens; those beyond spell nothing.
    return tokenizer.show(token, begins=begins) if token < tokenizer.vocab_size else ""


def choose_for_rows(rows: Sequence[Row], scores: Array) -> Chosen:
    """Choose the next token of each row by the options of the first."""
    request = rows[0].request
    return choose_tokens(
        scores,
        [row.history for row in rows],
        request.sampling,
        [row.generator for row in rows],
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        masks=[row.grammar.find_allowed() for row in rows if row.grammar] or None,
    )
