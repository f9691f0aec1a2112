"""Tokens as they stand in a text."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from ...errors import InputError
from ...text.tokenizer import Encoding, Tokenizer
from .explanation import Token


def encode_alone(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of an answer or a word; a space before it is none more than the tokenizer's own.

    Some tokenizers put a space before every text (Llama 2, Mistral, Marian): what they make of "sea" is what
    stands for " sea" within a text.
    """
    if text.startswith(" ") and puts_space(tokenizer):
        text = text[1:]
    return tokenizer.encode(text)


def puts_space(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer puts a space before every text."""
    spelled = b"".join(tokenizer.find_bytes(token) for token in tokenizer.encode("a"))
    return spelled.startswith(b" ")


def describe_ids(
    tokenizer: Tokenizer, ids: Sequence[int], part: str, *, continues: bool = False
) -> list[Token]:
    """Return tokens with what they spell, one behind the other; special ones are a part of their own.

    A space that the tokenizer put before a text, which decoding takes away, counts in no token's place. The
    first space of what `continues` a text is its own.
    """
    spelled = [tokenizer.find_bytes(token_id) for token_id in ids]
    text = b"".join(spelled).decode(errors="replace")
    added = 0 if continues else count_spaces(text) - count_spaces(tokenizer.decode_known(ids))
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    tokens = []
    end = -added
    for token_id, piece in zip(ids, spelled, strict=True):
        start = end
        end += len(characters.decode(piece))  # of a character in parts: with its last part
        shown = piece.decode(errors="replace") if piece else tokenizer.spell(token_id)
        own_part = part if piece else "special"
        tokens.append(Token(shown, int(token_id), own_part, max(0, start), max(0, end)))
    return tokens


def count_spaces(text: str) -> int:
    """Return how many spaces a text begins with."""
    return len(text) - len(text.lstrip(" "))


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
        ids = encode_alone(tokenizer, word)
        if len(ids) != 1:
            pieces = " ".join(repr(tokenizer.show(one)) for one in ids)
            raise InputError(
                f"watch takes words of one token; {word!r} has {len(ids)}: {pieces or 'nothing'}. The space"
                " before a word belongs to its token: try ' word'",
                option="watch",
            )
        found.append(ids[0])
    return found
