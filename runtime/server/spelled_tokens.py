"""The tokens of answers as OpenAI writes them: spelled, and placed where in the text they begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..decoding.chunk import Chunk, TopLogprob
from ..generate.generation import Generation
from ..text.tokenizer import Tokenizer


def spell_token(tokenizer: Tokenizer, token: int, mark: str = "") -> tuple[str, bytes]:
    r"""Return what a token reads as, alone, and its bytes.

    One that is part of a character reads as its bytes behind a mark, such as "bytes:\xe2\x80".
    """
    if token >= tokenizer.vocab_size:  # a model may have more than its tokenizer
        return "", b""
    content = tokenizer.find_bytes(token)
    try:
        content.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in content), content
    text = tokenizer.decode([token]) or tokenizer.spell(token)
    return text, text.encode()


@dataclass(frozen=True)
class PlacedToken:
    """A token of an answer, what was likely at its place, and where in the answer's text it begins."""

    token: int
    logprob: float
    likeliest: Sequence[TopLogprob]
    offset: int


class TokenPlaces:
    """Finds where an answer's tokens begin in its text, which may come in chunks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream()
        self._decoded = 0  # characters of all tokens so far
        self._shown = 0  # those that chunks have
        self._waiting: list[PlacedToken] = []

    def take(self, part: Generation | Chunk) -> list[PlacedToken]:
        """Take what came; return the tokens whose text was shown, and at the end all others.

        Those that the text does not show, such as a stop string's, begin where it ends.
        """
        tops = part.top_logprobs or [()] * len(part.token_ids)
        for token, logprob, top in zip(part.token_ids, part.logprobs, tops, strict=True):
            self._waiting.append(PlacedToken(token, logprob, top, self._decoded))
            if token < self._tokenizer.vocab_size:
                self._decoded += len(self._stream.push(token))
        self._shown += len(part.text)
        count = sum(1 for one in self._waiting if one.offset < self._shown)
        if part.finish_reason is not None:
            count = len(self._waiting)
        ready = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return [replace(one, offset=min(one.offset, self._shown)) for one in ready]
