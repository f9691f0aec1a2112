"""How many bytes of a text a model is given at most: more are not tokenized."""

from __future__ import annotations

from .encode.text_encoder import TextEncoder
from .generate.text_generator import TextGenerator
from .model import Model
from .text.tokenizer import Tokenizer
from .translate.translator import Translator

LEAST_BYTES = 65_536  # of a prompt that are always read: a few tokens may stand for very long words
LEAST_WINDOWED = 262_144  # of a text for an encoder, which reads a long one in windows


def count_longest_text(model: Model, context: int | None = None) -> int:
    """Return how many bytes a prompt or a text may have: at least what the model's tokens may spell.

    `context` is a text generator's, in tokens; the model's unless given.
    """
    if isinstance(model, TextGenerator):
        tokens = model.max_length if context is None else context
        return max(tokens * measure_longest_token(model.tokenizer), LEAST_BYTES)
    if isinstance(model, Translator):
        return max(model.max_length * measure_longest_token(model.source_tokenizer), LEAST_BYTES)
    assert isinstance(model, TextEncoder)
    return max(model.defaults.max_length * measure_longest_token(model.tokenizer), LEAST_WINDOWED)


def measure_longest_token(tokenizer: Tokenizer) -> int:
    """Return the bytes of the longest token's text."""
    pieces = map(tokenizer.find_piece, range(tokenizer.vocab_size))
    return max(len((piece or "").encode()) for piece in pieces)
