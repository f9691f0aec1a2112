"""Real text, of which every token is predicted, to measure what a decoder loses in int8 and int4.

T tokens of a passage, N rows, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...runtime.decoding.decoder import Decoder
from ...runtime.decoding.sampling import token_logprobs
from ...runtime.diagnostics.golden.evenly import evenly
from ...runtime.diagnostics.metrics import Logits, kl_divergence, plain

PASSAGE_TOKENS = 256  # at most of one, and at most the context
JUDGED = 0.6  # of the passages; the others are for calibration
MOST_PASSAGES = 32
LOGITS_BYTES = 128 * 2**20  # of all passages together: where that is too little, of some positions
GOLDEN_ROWS = 8  # of each passage, whose logits golden data keeps
Integers = npt.NDArray[np.int64]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Passage:
    """A text, and how PyTorch predicts it.

    Attributes:
        tokens: T of them.
        likeliest: (T - 1,) the token that PyTorch expects after each.
        logprobs: (T - 1,) float32 of the token that comes.
        rows: positions whose logits are known.
        logits: (len(rows), V).
    """

    tokens: tuple[int, ...]
    likeliest: Integers
    logprobs: npt.NDArray[np.float32]
    rows: Integers
    logits: Logits

    def thin(self) -> Passage:
        """Return the passage with the logits of `GOLDEN_ROWS` positions."""
        keep = list(evenly(len(self.rows), GOLDEN_ROWS))
        return Passage(self.tokens, self.likeliest, self.logprobs, self.rows[keep], self.logits[keep])


@dataclass(frozen=True)
class TextMetrics:
    """What a decoder loses on real text.

    Attributes:
        text_kl: KL divergence of the engine from the reference, in nats, averaged over the known rows.
        top1_changes: share of positions where another token is the likeliest.
        perplexity_change: of the text, as a share of the reference's perplexity; a gain counts as none.
        finite: no NaN and no infinity.
        rows: how many positions were compared.
    """

    text_kl: float
    top1_changes: float
    perplexity_change: float
    finite: bool
    rows: int

    LIMITED: ClassVar[tuple[str, ...]] = ("text_kl", "top1_changes", "perplexity_change")

    def to_json(self) -> dict[str, Any]:
        return {name: plain(value) for name, value in vars(self).items()}


def windows(
    encoded: Sequence[Sequence[int]], context: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Cut the joined texts into passages: those to judge with, and the rest, to calibrate with.

    A text of a single passage is both.
    """
    text = [token for tokens in encoded for token in tokens]
    length = min(PASSAGE_TOKENS, context)
    cut = [tuple(text[start : start + length]) for start in range(0, len(text), length)]
    cut = [tokens for tokens in cut if len(tokens) > 1][:MOST_PASSAGES]
    judged = max(1, round(JUDGED * len(cut)))
    return cut[:judged], cut[judged:] or cut


def passage_of(tokens: tuple[int, ...], logits: Logits, passages: int = 1) -> Passage:
    """Return a passage, one of several, with as many of PyTorch's logits (T - 1, V) as memory allows each."""
    following = np.asarray(tokens[1:])
    logprobs = token_logprobs(logits, following).astype(np.float32)
    allowed = max(1, LOGITS_BYTES // (passages * logits[0].nbytes))
    rows = np.array(evenly(len(logits), allowed))
    return Passage(tokens, logits.argmax(-1), logprobs, rows, logits[rows])


def measure_text(got: Iterable[Logits], want: Sequence[Passage]) -> TextMetrics:
    """Compare the logits (T - 1, V) of each passage; the engine's are in memory for one passage at a time."""
    kl: list[Array] = []
    changed: list[npt.NDArray[np.bool_]] = []
    lost: list[npt.NDArray[np.float32]] = []  # of each token's log-probability
    finite = True
    for logits, passage in zip(got, want, strict=True):
        if not np.isfinite(logits).all():
            finite = False
            continue
        kl.append(kl_divergence(passage.logits, logits[passage.rows]))
        changed.append(logits.argmax(-1) != passage.likeliest)
        own = token_logprobs(logits, np.asarray(passage.tokens[1:])).astype(np.float32)
        lost.append(passage.logprobs - own)
    rows = sum(len(passage.likeliest) for passage in want)
    if not finite:
        return TextMetrics(math.nan, 1.0, math.nan, False, rows)
    return TextMetrics(
        text_kl=float(np.concatenate(kl).mean()),
        top1_changes=float(np.concatenate(changed).mean()),
        perplexity_change=max(0.0, math.expm1(float(np.concatenate(lost).mean()))),
        finite=True,
        rows=rows,
    )


def read_passages(decoder: Decoder, passages: Sequence[Passage]) -> Iterator[Logits]:
    """Yield the engine's logits (T - 1, V) of each passage."""
    for passage in passages:
        run = decoder.start(1, len(passage.tokens))
        yield np.concatenate(list(run.extend(passage.tokens[:-1])))


def to_arrays(passages: Sequence[Passage]) -> dict[str, npt.NDArray[Any]]:
    """Return the passages as golden data keeps them."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for i, passage in enumerate(passages):
        thin = passage.thin()
        arrays |= {f"passage.{i}.{name}": np.asarray(value) for name, value in vars(thin).items()}
    return arrays


def from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[Passage, ...]:
    """Return the passages that `to_arrays` stored."""
    count = sum(name.startswith("passage.") and name.endswith(".tokens") for name in arrays)
    return tuple(
        Passage(
            tokens=tuple(int(token) for token in arrays[f"passage.{i}.tokens"]),
            likeliest=arrays[f"passage.{i}.likeliest"],
            logprobs=arrays[f"passage.{i}.logprobs"],
            rows=arrays[f"passage.{i}.rows"],
            logits=arrays[f"passage.{i}.logits"],
        )
        for i in range(count)
    )
