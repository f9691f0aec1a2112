"""Tokens as they stand in a text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..errors import InputError
from ..text.stream import is_byte
from ..text.tokenizer import Encoding, Tokenizer
from .explanation import Token

SPACE = "▁"  # how SentencePiece spells a space


def spell_token(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return what a token adds to a text, the space before it included; nothing of a special one."""
    piece = tokenizer.find_piece(token_id)
    if piece is None:
        return b""
    if tokenizer.byte_level or (tokenizer.byte_fallback and is_byte(piece)):
        return tokenizer.find_bytes(token_id)
    return piece.replace(SPACE, " ").encode()


def show_token(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token as it is to be shown; half a character is U+FFFD."""
    spelled = spell_token(tokenizer, token_id)
    return spelled.decode(errors="replace") if spelled else tokenizer.spell(token_id)


def describe_ids(tokenizer: Tokenizer, ids: Sequence[int], part: str) -> list[Token]:
    """Return tokens with what they spell, one behind the other; special ones are a part of their own."""
    tokens = []
    written = b""
    for token_id in ids:
        spelled = spell_token(tokenizer, token_id)
        start = len(written.decode(errors="ignore"))
        written += spelled
        end = len(written.decode(errors="ignore"))
        text = spelled.decode(errors="replace") if spelled else tokenizer.spell(token_id)
        tokens.append(Token(text, int(token_id), part if spelled else "special", start, end))
    return tokens


def describe_encoding(encoding: Encoding, text: str, part: str, kept: Collection[int]) -> list[Token]:
    """Return those tokens of a text that are kept, each with the space before it."""
    tokens = []
    before = 0
    for index, (token_id, (start, end)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True)):
        shown = text[before:end] if text[before:start].isspace() else text[start:end]
        before = end
        if index in kept:
            tokens.append(Token(shown, token_id, part, start, end))
    return tokens


def find_watched(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    """Return the token of each word; refuse a word of several."""
    found = []
    for word in words:
        ids = tokenizer.encode(word)
        if len(ids) != 1:
            pieces = " ".join(repr(show_token(tokenizer, one)) for one in ids)
            raise InputError(
                f"watch takes words of one token, and {word!r} is {len(ids)}: {pieces or 'nothing'}. A space"
                " before a word counts: most words have one",
                option="watch",
            )
        found.append(ids[0])
    return found
