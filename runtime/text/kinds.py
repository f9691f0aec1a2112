"""Chooses the class that reads a bundle's tokenizer."""

from __future__ import annotations

from ..errors import ManifestError
from .piece_tokenizer import PieceTokenizer
from .tokenizer import Tokenizer

PLAIN = "plain"  # a tokenizer.json as it is; SentencePiece with another's numbering
PIECES = "pieces"
KINDS = (PLAIN, PIECES)


def open_tokenizer(data: bytes, source: str, kind: str, vocab_size: int) -> Tokenizer:
    """Return a tokenizer of a kind.

    Args:
        data: the bytes of a tokenizer.json.
        source: what error messages call it.
        kind: one of `KINDS`.
        vocab_size: the model's number of tokens.

    Raises:
        ManifestError: no such kind.
        TokenizerError: the content is not such a tokenizer.
    """
    if kind not in KINDS:
        raise ManifestError(f"{source}: its kind {kind!r} is not one of {', '.join(KINDS)}")
    return Tokenizer(data, source) if kind == PLAIN else PieceTokenizer(data, source, vocab_size)
