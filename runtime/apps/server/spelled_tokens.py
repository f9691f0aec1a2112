"""The tokens of answers as OpenAI writes them: spelled, and placed where in the text they begin."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...decoding.chunk import Chunk, TopLogprob
from ...generate.generation import Generation
from ...text.tokenizer import Tokenizer


def spell_token(
    tokenizer: Tokenizer, token: int, *, begins: bool = False, mark: str = ""
) -> tuple[str, bytes]:
    r"""Return what a token reads as, and the bytes that it adds to the text; with `begins` as its first.

    One that is part of a character reads as its bytes behind a mark, such as "bytes:\xe2\x80". A special one
    reads as its name and adds nothing.
    """
    if token >= tokenizer.vocab_size:  # a model may have more than its tokenizer
        return "", b""
    content = tokenizer.find_bytes(token, begins=begins)
    try:
        content.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in content), content
    return tokenizer.show(token, begins=begins), content


@dataclass(frozen=True)
class PlacedToken:
    """A token of an answer, what was likely at its place, and where in the answer's text it begins.

    `begins` says whether it is the first of its text: then words have no space before them.
    """

    token: int
    logprob: float
    likeliest: Sequence[TopLogprob]
    offset: int
    begins: bool


class TokenPlaces:
    """Finds where an answer's tokens begin in its text, which may come in chunks.

    Args:
        tokenizer: spells tokens.
        continues: whether the text goes on with a prompt's.
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool) -> None:
        self._tokenizer = tokenizer
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._begins = not continues
        self._decoded = 0  # characters of all tokens so far
        self._shown = 0  # those that chunks have
        self._waiting: list[PlacedToken] = []

    def place(self, part: Generation | Chunk) -> list[PlacedToken]:
        """Return the tokens that came, each where it begins among all so far."""
        placed: list[PlacedToken] = []
        tops = part.top_logprobs or [()] * len(part.token_ids)
        for token, logprob, top in zip(part.token_ids, part.logprobs, tops, strict=True):
            placed.append(PlacedToken(token, logprob, top, self._decoded, self._begins))
            if token < self._tokenizer.vocab_size:
                added = self._tokenizer.find_bytes(token, begins=self._begins)
                self._decoded += len(self._characters.decode(added))
                self._begins = self._begins and not self._tokenizer.find_context([token])
        return placed

    def take(self, part: Generation | Chunk) -> list[PlacedToken]:
        """Take what came; return the tokens whose text was shown, and at the end all others.

        Those that the text does not show, such as a stop string's, begin where it ends.
        """
        self._waiting += self.place(part)
        self._shown += len(part.text)
        count = sum(1 for one in self._waiting if one.offset < self._shown)
        if part.finish_reason is not None:
            count = len(self._waiting)
        ready = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return [replace(one, offset=min(one.offset, self._shown)) for one in ready]
