"""A prompt's tokens, as a model of pictures reads them."""

from __future__ import annotations

from typing import NamedTuple

from ..bundle.image_defaults import PromptDefaults
from ..text.long_text import fit
from ..text.tokenizer import Tokenizer


class PromptTokens(NamedTuple):
    """The tokens of a prompt.

    Attributes:
        ids: as many as the model reads, special tokens and padding included.
        dropped: how many at the prompt's end were left out.
    """

    ids: tuple[int, ...]
    dropped: int


def encode_prompt(tokenizer: Tokenizer, defaults: PromptDefaults, text: str) -> PromptTokens:
    """Return the tokens of a prompt, in which special tokens are read as such, as diffusers does."""
    fitted = fit(
        tokenizer.encode(text, parse_special=True),
        None,
        max_length=defaults.max_length,
        special_tokens=defaults.special_tokens,
        truncation="head",
    )
    ids = fitted.pieces[0].ids
    padding = [defaults.pad] * (defaults.max_length - len(ids))
    return PromptTokens((*ids, *padding), fitted.dropped)
