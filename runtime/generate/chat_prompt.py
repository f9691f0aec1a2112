"""Turns a conversation into the tokens of a prompt that fits the context."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ContextLengthError, InputError
from ..text.chat import Chat, Message
from ..text.chat_turns import cut_chat
from ..text.tokenizer import Tokenizer

log = logging.getLogger("planforge")


@dataclass(frozen=True)
class ChatReader:
    """Renders conversations with a bundle's chat template, if it has one."""

    chat: Chat | None
    tokenizer: Tokenizer
    max_length: int

    def read(self, messages: Sequence[Message], parse_special: bool) -> list[int]:
        """Return the tokens of a conversation, up to where the model is to answer."""
        if self.chat is None:
            raise InputError(
                "the bundle has no chat template; generate() (without --chat) takes a prompt as it is, or"
                " export again from a folder with chat_template.jinja or chat_template in"
                " tokenizer_config.json"
            )
        return self.chat.encode(messages, self.tokenizer, parse_special)

    def read_fitting(
        self,
        messages: Sequence[Message],
        *,
        parse_special: bool,
        max_new_tokens: int,
        truncation: str | None,
    ) -> tuple[list[int], int]:
        """Return the tokens of a conversation that fits the context, and how many were dropped.

        Args:
            messages: the conversation.
            parse_special: read special tokens that messages spell as such.
            max_new_tokens: what "tail" leaves room for, half a context at most.
            truncation: None drops nothing; "tail" drops the oldest turns, a user's message with its answer,
                never what the system said.

        Raises:
            InputError: the bundle has no chat template, or it refuses the messages.
            ContextLengthError: what may not be dropped leaves no room for an answer.
        """
        limit = self.max_length - 1
        if truncation is None:
            tokens = self.read(messages, parse_special)
            dropped = 0
            what = "the conversation has"
            way_out = "Shorten it, or drop its oldest turns by truncation='tail'"
        else:
            room = self.max_length - min(max_new_tokens, self.max_length // 2)
            cut = cut_chat(messages, lambda kept: self.read(kept, parse_special), room)
            tokens = cut.tokens
            dropped = cut.dropped_tokens
            what = "the last message, with what the system said, has"
            way_out = "Shorten one of the two; neither is ever cut"
            if cut.dropped_messages and len(tokens) <= limit:
                log.warning(
                    "the conversation has %d tokens; its %d oldest messages were dropped, %d tokens",
                    len(tokens) + dropped,
                    cut.dropped_messages,
                    dropped,
                )
        if len(tokens) > limit:
            raise ContextLengthError(
                f"{what} {len(tokens)} tokens; the context holds {self.max_length}, of which one must be left"
                f" for the answer. {way_out}",
                tokens=len(tokens),
                limit=limit,
            )
        return tokens, dropped
