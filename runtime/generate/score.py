"""How likely a language model finds a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..decoding.decoder import SCORE_CHUNK, Decoder
from ..decoding.sampling import compute_logprobs
from ..errors import ContextLengthError, InputError


@dataclass(frozen=True)
class Score:
    """How likely the model finds a text.

    Attributes:
        token_ids: T tokens.
        logprobs: T - 1 numbers, of each token after the first, given those before it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.total / len(self.logprobs))


def score_tokens(decoder: Decoder, tokens: Sequence[int], max_length: int, adapter: int = 0) -> Score:
    """Return the score of tokens; refuse fewer than two, and more than the context holds."""
    if len(tokens) < 2:
        raise InputError(f"score needs a text of at least 2 tokens, this one has {len(tokens)}")
    if len(tokens) > max_length:
        raise ContextLengthError(
            f"the text has {len(tokens)} tokens, the context holds {max_length}; score it in parts",
            tokens=len(tokens),
            limit=max_length,
        )
    logprobs: list[float] = []
    rows = min(SCORE_CHUNK, len(tokens))
    run = decoder.start(1, len(tokens), logit_rows=rows, adapters=[adapter])
    for logits in run.extend(tokens[:-1]):
        following = np.asarray(tokens[len(logprobs) + 1 :][: len(logits)])
        logprobs += compute_logprobs(logits, following).tolist()
    return Score(tuple(tokens), tuple(logprobs))
