"""Turns a caller's prompts and conversations into rows that are ready to be answered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..bundle.defaults import GenerationDefaults
from ..errors import InputError
from ..text.chat import Message
from .chat_prompt import ChatReader
from .prompts import Prompt, PromptReader, name_prompt
from .request import GenerationRequest
from .row import Row


@dataclass(frozen=True, kw_only=True)
class RowReader:
    """Makes rows of prompts and conversations."""

    prompts: PromptReader
    chats: ChatReader
    defaults: GenerationDefaults

    def read(self, prompt: Any, request: GenerationRequest, number: int = 0) -> Row:
        """Return the row of a prompt."""
        tokens = self.prompts.read(prompt, request.parse_special)
        fitting, cut = self.prompts.fit(tokens, request.max_new_tokens, request.truncation)
        return self._row_of(fitting, cut, request, number)

    def read_numbered(self, number: int, prompt: Any, request: GenerationRequest) -> Row:
        """Return the row of one of several prompts, which errors name."""
        with name_prompt(number):
            return self.read(prompt, request, number)

    def read_some(
        self, numbered: Iterable[tuple[int, Prompt]], request: GenerationRequest
    ) -> tuple[list[Row], InputError | None]:
        """Return rows up to the first prompt that cannot be used, and why it cannot."""
        rows: list[Row] = []
        try:
            for number, prompt in numbered:
                rows.append(self.read_numbered(number, prompt, request))
        except InputError as error:
            return rows, error
        return rows, None

    def read_chat(self, messages: Sequence[Message], request: GenerationRequest) -> Row:
        """Return the row of a conversation."""
        tokens, cut = self.chats.read_fitting(
            messages,
            parse_special=request.parse_special,
            max_new_tokens=request.max_new_tokens,
            truncation=request.truncation,
        )
        return self._row_of(tokens, cut, request)

    def _row_of(self, tokens: list[int], cut: int, request: GenerationRequest, number: int = 0) -> Row:
        return Row(
            tokenizer=self.prompts.tokenizer,
            prompt=tokens,
            cut=cut,
            room=self.prompts.max_length - len(tokens),
            request=request,
            eos=self.defaults.eos,
            number=number,
        )
