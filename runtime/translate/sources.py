"""Turns texts into the tokens that a translation's encoder reads."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from ..bundle.defaults import GenerationDefaults
from ..errors import ContextLengthError, InputError
from ..options import check_choice
from ..text.tokenizer import Tokenizer

CHARACTERS_PER_TOKEN = 256  # at least as many as any token has; longer texts are not even tokenized

log = logging.getLogger("planforge")


@dataclass(frozen=True)
class Source:
    """A text as the encoder reads it.

    Attributes:
        tokens: those that begin and end it included.
        dropped: tokens of the text that truncation left out.
    """

    tokens: list[int]
    dropped: int = 0


class SourceReader:
    """Tokenizes the texts of one call, and cuts those that are too long if it was asked to.

    Args:
        tokenizer: the source language's tokenizer.
        defaults: says what begins and ends a source.
        limit: tokens that the encoder reads at most.
        truncation, parse_special: as in `TranslationOptions`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        *,
        limit: int,
        truncation: Literal["head", "tail"] | None,
        parse_special: bool,
    ) -> None:
        check_choice("truncation", truncation, (None, "head", "tail"))
        assert defaults.source_eos is not None  # load() sees to it
        self.tokenizer = tokenizer
        self.prefix = defaults.prefix
        self.end = defaults.source_eos
        self.limit = limit
        self.truncation = truncation
        self.parse_special = parse_special
        self._codes = {tokenizer.token_id(code) for code in tokenizer.language_codes}
        self._shortened = 0
        self._dropped = 0

    def read(self, text: str, number: int | None = None) -> Source:
        """Return the tokens of a text; `number` is its index among several, for errors.

        Raises:
            InputError: the text is empty, or cannot be tokenized.
            ContextLengthError: it is too long, and truncation is None.
        """
        try:
            return self._read(text)
        except ContextLengthError as error:
            if number is None:
                raise
            message = f"texts[{number}]: {error}"
            raise ContextLengthError(message, tokens=error.tokens, limit=error.limit) from error
        except InputError as error:
            if number is None:
                raise
            raise InputError(f"texts[{number}]: {error}") from error

    def report(self) -> None:
        """Say in the log what was left out of the texts that were read."""
        if self._dropped:
            log.warning(
                "%d texts were longer than the %d tokens that this model reads, and %d tokens were"
                " dropped (truncation=%r)",
                self._shortened,
                self.limit,
                self._dropped,
                self.truncation,
            )

    def _read(self, text: str) -> Source:
        if self.truncation is None and len(text) > CHARACTERS_PER_TOKEN * self.limit:
            raise ContextLengthError(
                f"a text of {len(text)} characters is more than the {self.limit} tokens that the model reads."
                " Translate it in parts, such as sentences, or choose truncation='head' or 'tail'",
                tokens=len(text) // CHARACTERS_PER_TOKEN,
                limit=self.limit,
            )
        tokens = self.tokenizer.encode(text, parse_special=self.parse_special)
        if not tokens:
            raise InputError("a text to translate is empty; leave it out")
        room = self.limit - len(self.prefix) - 1
        if len(tokens) <= room:
            return Source([*self.prefix, *tokens, self.end])
        if self.truncation is None:
            whole = len(self.prefix) + len(tokens) + 1
            raise ContextLengthError(
                f"the text {text[:40]!r}... has {whole} tokens, the end token included; the model"
                f" reads {self.limit}. Translate it in parts, such as sentences, or choose"
                " truncation='head' or 'tail'",
                tokens=whole,
                limit=self.limit,
            )
        self._shortened += 1
        self._dropped += len(tokens) - room
        return Source([*self.prefix, *self._cut(tokens, room), self.end], len(tokens) - room)

    def _cut(self, tokens: list[int], room: int) -> list[int]:
        """Return what truncation keeps; a language code that begins the text stays."""
        if self.truncation == "head":
            return tokens[:room]
        code = tokens[:1] if tokens[0] in self._codes else []
        return [*code, *tokens[len(tokens) - (room - len(code)) :]]
