"""How answers are written in OpenAI's two forms: whole, and in chunks."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar

from ...decoding.chunk import Chunk
from ...generate.generation import Generation
from ...text.tokenizer import Tokenizer
from .answers import (
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatEvent,
    ChatLogprobs,
    ChosenLogprob,
    CompletionAnswer,
    CompletionChoice,
    CompletionEvent,
    CompletionLogprobs,
    Delta,
    FinishReason,
    Message,
    ReadNeighbour,
    Record,
    StreamedChatChoice,
    StreamedToolCall,
    TokenLogprob,
    ToolCall,
)
from .call_splitter import CallSplitter, cut_calls
from .spelled_tokens import PlacedToken, TokenPlaces, spell_token

FINISH_REASONS: dict[str, FinishReason] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "context": "length",
    "cancelled": "stop",
}
LEAST = -9999.0  # a log-probability of what is impossible, as OpenAI has it: JSON has no infinity
BYTES = "bytes:"  # before the bytes of a token that is part of a character, in completions


class Form(ABC):
    """Writes the choices of a route's answers.

    Attributes:
        prefix: of the answers' ids.
        answer: the type of an answer.
        event: and of a stream's events.
        continues: of each answer, whether its text goes on with a prompt's; a chat's does not.
    """

    prefix: ClassVar[str]
    answer: ClassVar[type[ChatAnswer | CompletionAnswer]]
    event: ClassVar[type[ChatEvent | CompletionEvent]]

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self.tokenizer = tokenizer
        self.logprobs = logprobs
        self.continues: Sequence[bool] = ()
        self._places: dict[int, TokenPlaces] = {}  # of the tokens of each answer

    def find_places(self, index: int) -> TokenPlaces:
        """Return the places of an answer's tokens, which follow it from its beginning."""
        if index not in self._places:
            continues = index < len(self.continues) and self.continues[index]
            self._places[index] = TokenPlaces(self.tokenizer, continues=continues)
        return self._places[index]

    @abstractmethod
    def write_answer(self, index: int, answer: Generation) -> Record:
        """Return the choice of a whole answer."""

    @abstractmethod
    def write_start(self, index: int) -> Sequence[Record]:
        """Return the choices before the first chunk."""

    @abstractmethod
    def write_chunk(self, index: int, chunk: Chunk) -> Sequence[Record]:
        """Return the choices of a chunk; of one that shows nothing, none."""

    @abstractmethod
    def write_end(self, index: int, answer: Generation) -> Sequence[Record]:
        """Return the choices behind the last chunk."""


class ChatForm(Form):
    """The form of /v1/chat/completions.

    Args:
        tokenizer: spells tokens.
        logprobs: whether answers show log-probabilities.
        tools: the names of those that the model may call. Of a stream what may be a call is held back.
    """

    prefix = "chatcmpl-"
    answer = ChatAnswer
    event = ChatEvent

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool, tools: Collection[str] = ()) -> None:
        super().__init__(tokenizer, logprobs=logprobs)
        self._tools = tools
        self._splitters: dict[int, CallSplitter] = {}  # of the answers that come in chunks

    def write_answer(self, index: int, answer: Generation) -> ChatChoice:
        message = Message(content=answer.text, refusal=None, annotations=[])
        if answer.tool_calls:
            message.content = cut_calls(answer.text, self._tools) or None
            message.tool_calls = write_calls(answer)
        return ChatChoice(index, message, self._write_logprobs(index, answer), find_reason(answer))

    def write_start(self, index: int) -> list[StreamedChatChoice]:
        delta = Delta(role="assistant", content="", refusal=None)
        return [StreamedChatChoice(index, delta, logprobs=None, finish_reason=None)]

    def write_chunk(self, index: int, chunk: Chunk) -> list[StreamedChatChoice]:
        text = chunk.text
        if self._tools:
            text = self._find_splitter(index).push(text)
        if not text and not (self.logprobs and chunk.token_ids):
            return []
        logprobs = self._write_logprobs(index, chunk)
        return [StreamedChatChoice(index, Delta(content=text), logprobs, finish_reason=None)]

    def write_end(self, index: int, answer: Generation) -> list[StreamedChatChoice]:
        deltas: list[Delta] = []
        if self._tools:
            text = cut_calls(answer.text, self._tools) if answer.tool_calls else answer.text
            if rest := text[self._find_splitter(index).shown :]:
                deltas.append(Delta(content=rest))
        if answer.tool_calls:
            calls = write_calls(answer)
            streamed = [StreamedToolCall(call.id, call.function, number) for number, call in enumerate(calls)]
            deltas.append(Delta(tool_calls=streamed))
        deltas.append(Delta())
        choices = [StreamedChatChoice(index, one, logprobs=None, finish_reason=None) for one in deltas]
        choices[-1].finish_reason = find_reason(answer)
        return choices

    def _find_splitter(self, index: int) -> CallSplitter:
        """Return what splits an answer's chunks, from its beginning."""
        if index not in self._splitters:
            self._splitters[index] = CallSplitter(self._tools)
        return self._splitters[index]

    def _write_logprobs(self, index: int, part: Generation | Chunk) -> ChatLogprobs | None:
        if not self.logprobs:
            return None
        content: list[ChosenLogprob] = []
        for one in self.find_places(index).place(part):
            likeliest = [self._write_token(top.token_id, top.logprob, one.begins) for top in one.likeliest]
            chosen = self._write_token(one.token, one.logprob, one.begins)
            content.append(ChosenLogprob(chosen.token, chosen.logprob, chosen.bytes, likeliest))
        return ChatLogprobs(content, refusal=None)

    def _write_token(self, token: int, logprob: float, begins: bool) -> TokenLogprob:
        text, content = spell_token(self.tokenizer, token, begins=begins)
        return TokenLogprob(text, max(logprob, LEAST), list(content))


def write_neighbours(answer: Generation) -> list[list[ReadNeighbour]]:
    """Return the neighbours that were read of each chunk."""
    return [
        [ReadNeighbour(one.document, one.start, one.distance, one.text) for one in neighbours]
        for neighbours in answer.neighbours
    ]


class CompletionForm(Form):
    """The form of /v1/completions."""

    prefix = "cmpl-"
    answer = CompletionAnswer
    event = CompletionEvent

    def write_answer(self, index: int, answer: Generation) -> CompletionChoice:
        choice = self._write(index, answer)
        if answer.neighbours:
            choice.neighbours = write_neighbours(answer)
        return choice

    def write_start(self, index: int) -> list[CompletionChoice]:
        return []

    def write_chunk(self, index: int, chunk: Chunk) -> list[CompletionChoice]:
        choice = self._write(index, chunk)
        return [choice] if chunk.text or chunk.finish_reason is not None else []

    def write_end(self, index: int, answer: Generation) -> list[CompletionChoice]:
        if not answer.neighbours:
            return []
        return [CompletionChoice(index, "", None, None, write_neighbours(answer))]

    def _write(self, index: int, part: Generation | Chunk) -> CompletionChoice:
        """Return a choice with the tokens whose text it has, and the last one with those that have none."""
        logprobs: CompletionLogprobs | None = None
        if self.logprobs:
            logprobs = self._write_logprobs(self.find_places(index).take(part))
        reason = None if part.finish_reason is None else FINISH_REASONS[part.finish_reason]
        return CompletionChoice(index, part.text, logprobs, reason)

    def _write_logprobs(self, tokens: Sequence[PlacedToken]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[self._spell(one.token, one) for one in tokens],
            token_logprobs=[max(one.logprob, LEAST) for one in tokens],
            top_logprobs=[self._write_likeliest(one) for one in tokens if one.likeliest] or None,
            text_offset=[one.offset for one in tokens],
        )

    def _spell(self, token: int, place: PlacedToken) -> str:
        """Return what a token reads as that was chosen, or likely, at a place."""
        return spell_token(self.tokenizer, token, begins=place.begins, mark=BYTES)[0]

    def _write_likeliest(self, place: PlacedToken) -> dict[str, float]:
        """Return the tokens that were likeliest at a place, and the chosen one, which reads as in `tokens`.

        Another that reads like one before is spelled as in the vocabulary, or where that is taken too by its
        number: no key stands for two.
        """
        logprobs = {one.token_id: one.logprob for one in place.likeliest} | {place.token: place.logprob}
        names = {place.token: self._spell(place.token, place)}
        for token in logprobs:
            if token not in names:
                spelled = self.tokenizer.spell(token) if token < self.tokenizer.vocab_size else ""
                texts = (self._spell(token, place), spelled, f"token_id:{token}")
                names[token] = next(text for text in texts if text not in names.values())
        return {names[token]: max(logprob, LEAST) for token, logprob in logprobs.items()}


def find_reason(answer: Generation) -> FinishReason:
    """Return OpenAI's word for why an answer ended."""
    return "tool_calls" if answer.tool_calls else FINISH_REASONS[answer.finish_reason]


def write_calls(answer: Generation) -> list[ToolCall]:
    """Return an answer's calls of tools."""
    return [
        ToolCall(f"call_{uuid.uuid4().hex[:24]}", CalledFunction(call.name, call.arguments))
        for call in answer.tool_calls
    ]
