"""The results of translating text.

L layers, H heads, S source tokens, T target tokens
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..decoding.chunk import FinishReason
from ..option_checks import check_whole

Array: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TranslationTimings:
    """Where a batch's time went; its texts share one clock.

    Attributes:
        encode_ms: the sources.
        decode_ms: all steps of the search.
        tokens_per_s: new tokens of the whole batch over both.
    """

    encode_ms: float
    decode_ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class Candidate:
    """One of several translations of a text; the fields are `Translation`'s."""

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class Alignment:
    """How much each target token looked at each source token.

    Attributes:
        source: the source's tokens as text, S of them.
        target: the translation's tokens as text, T of them.
        weights: (L, H, T, S) float32; what a target token looked at while it was chosen. They add up to 1.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: Array

    def averaged(self, layer: int | None = None, head: int | None = None) -> Array:
        """Return (T, S) of one layer and head, or the average over all.

        Raises:
            InputError: no such layer or head.
        """
        layers, heads = self.weights.shape[:2]
        check_whole("layer", layer, 0, layers - 1, optional=True)
        check_whole("head", head, 0, heads - 1, optional=True)
        chosen = self.weights
        if layer is not None:
            chosen = chosen[[layer]]
        if head is not None:
            chosen = chosen[:, [head]]
        average: Array = chosen.mean((0, 1))
        return average


@dataclass(frozen=True)
class Translation:
    """What a text was translated to.

    Attributes:
        text: the best translation, without special tokens.
        token_ids: its tokens, the end token included.
        score: the sum of its tokens' log-probabilities / their number ** length_penalty.
        finish_reason: "eos", "length" (max_new_tokens) or "cancelled" (by on_token).
        candidates: the n best, this one first.
        dropped: tokens of the text that truncation left out.
        alignment: what its tokens looked at; None unless asked for by alignment=True.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    candidates: tuple[Candidate, ...]
    timings: TranslationTimings
    dropped: int = 0
    alignment: Alignment | None = field(default=None, compare=False)  # its arrays have no one truth value

    def to_json(self) -> dict[str, object]:
        """Return the fields of `planforge run --json`, which has no alignments."""
        fields = asdict(replace(self, alignment=None))
        del fields["alignment"]
        return fields
