"""A translation's tokenizers, and how texts become the tokens that its encoder reads."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..bundle.bundle import Bundle
from ..bundle.defaults import GenerationDefaults
from ..bundle.json_reader import Reader
from ..errors import ContextLengthError, InputError
from ..opening import list_tokenizer_files
from ..option_checks import check_choice
from ..text.piece_tokenizer import open_tokenizer
from ..text.reading import name_item
from ..text.tokenizer import Tokenizer, read

UNKNOWN_SHOWN = 8  # parts of texts that the tokenizer does not know
CHARACTERS_PER_TOKEN = 256  # at least as many as any token has; longer texts are not even tokenized

log = logging.getLogger("planforge")


@dataclass(frozen=True)
class Source:
    """A text as the encoder reads it."""

    tokens: list[int]  # those that begin and end it included
    dropped: int = 0  # tokens that truncation left out

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass
class SourceReader:
    """Tokenizes the texts of one call, and cuts those that are too long if it was asked to."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    limit: int  # tokens that the encoder reads at most
    truncation: Literal["head", "tail"] | None
    parse_special: bool
    shortened: int = 0  # texts so far
    dropped: int = 0  # tokens of them
    unknown: dict[str, None] = field(default_factory=dict)  # parts of texts, such as letters, in their order

    def __post_init__(self) -> None:
        check_choice("truncation", self.truncation, (None, "head", "tail"))

    def read(self, text: str) -> Source:
        """Return the tokens of a text."""
        if self.truncation is None and len(text) > CHARACTERS_PER_TOKEN * self.limit:
            raise ContextLengthError(
                f"a text of {len(text)} characters is longer than the {self.limit} tokens that the model"
                " reads. Translate it in parts, such as sentences, or choose truncation='head' or 'tail'",
                tokens=len(text) // CHARACTERS_PER_TOKEN,
                limit=self.limit,
            )
        tokens = self.tokenizer.encode(text, parse_special=self.parse_special)
        if not tokens:
            raise InputError("a text to translate is empty; leave it out")
        if len(self.unknown) <= UNKNOWN_SHOWN and self.tokenizer.unknown in tokens:
            self.unknown |= dict.fromkeys(self.tokenizer.find_unknown(text, self.parse_special))
        prefix = self.defaults.prefix
        end = self.defaults.source_eos
        assert end is not None  # load() sees to it
        whole = len(prefix) + len(tokens) + 1
        dropped = whole - self.limit
        if dropped <= 0:
            return Source([*prefix, *tokens, end])
        if self.truncation is None:
            raise ContextLengthError(
                f"the text {text[:40]!r}... has {whole} tokens, the end token included; the model"
                f" reads {self.limit}. Translate it in parts, such as sentences, or choose"
                " truncation='head' or 'tail'",
                tokens=whole,
                limit=self.limit,
            )
        self.shortened += 1
        self.dropped += dropped
        return Source([*prefix, *self._cut(tokens, len(tokens) - dropped), end], dropped)

    def read_all(self, texts: Iterable[str], first: int = 0) -> list[Source]:
        """Return the tokens of texts; errors name a text by its number, that of the first being `first`."""
        sources = []
        for number, text in enumerate(texts, first):
            with name_item(f"texts[{number}]"):
                sources.append(self.read(text))
        return sources

    def report(self) -> None:
        """Say in the log what was left out of the texts that were read, and what the model does not know."""
        if self.unknown:
            shown = ", ".join(map(repr, [*self.unknown][:UNKNOWN_SHOWN]))
            log.warning(
                "the model's tokenizer does not know %s%s; the model reads its unknown token there",
                shown,
                ", ..." if len(self.unknown) > UNKNOWN_SHOWN else "",
            )
        if self.dropped:
            log.warning(
                "%d texts were longer than the %d tokens that this model reads, and %d tokens were"
                " dropped (truncation=%r)",
                self.shortened,
                self.limit,
                self.dropped,
                self.truncation,
            )

    def _cut(self, tokens: list[int], room: int) -> list[int]:
        """Return what truncation keeps; a language code that begins the text stays."""
        if self.truncation == "head":
            return tokens[:room]
        code = tokens[:1] if self.tokenizer.spell(tokens[0]) in self.tokenizer.language_codes else []
        return [*code, *tokens[len(tokens) - (room - len(code)) :]]


def open_tokenizers(bundle: Bundle) -> tuple[Tokenizer, Tokenizer]:
    """Return the source's tokenizer and the target's; some models have one for both."""
    manifest = bundle.manifest
    kind = Reader(manifest.tokenizer, "tokenizer").get("kind", str)
    config = Reader(manifest.config, "config")
    names = list_tokenizer_files(manifest, 2)
    opened = {}
    for name, side in zip(names, ("source", "target"), strict=True):
        if name not in opened:
            path = bundle.path(name)
            opened[name] = open_tokenizer(read(path), str(path), kind, config.get(f"{side}_vocab_size", int))
    return opened[names[0]], opened[names[1]]
