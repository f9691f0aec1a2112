"""Chooses the class that reads a bundle's tokenizer."""

from __future__ import annotations

from ..errors import ManifestError
from .piece_tokenizer import PieceTokenizer
from .tokenizer import Tokenizer

PLAIN = "plain"  # a tokenizer.json as it is; SentencePiece with another's numbering
PIECES = "pieces"
KINDS = (PLAIN, PIECES)


def open_tokenizer(data: bytes, source: str, kind: str, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of one of `KINDS` for a tokenizer.json, which errors call `source`."""
    if kind not in KINDS:
        raise ManifestError(f"{source}: its kind {kind!r} is not one of {', '.join(KINDS)}")
    return Tokenizer(data, source) if kind == PLAIN else PieceTokenizer(data, source, vocab_size)
