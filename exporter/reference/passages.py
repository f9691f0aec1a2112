"""Real text, of which every token is predicted, to measure what a decoder loses in int8 and int4.

T tokens of a passage, N rows, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...runtime.apps.check.files import choose_evenly
from ...runtime.apps.check.metrics import Logits, TextMetrics, measure_kl, summarize_text
from ...runtime.decoding.cache_shapes import PREFILL_CHUNK
from ...runtime.decoding.decoder import Decoder
from ...runtime.decoding.sampling import compute_logprobs

PASSAGE_TOKENS = 256  # at most of one, and at most the context
JUDGED = 0.6  # of the passages; the others are for calibration
MOST_PASSAGES = 32
LOGITS_BYTES = 128 * 2**20  # of all passages together: where that is too little, of some positions
GOLDEN_ROWS = 8  # of each passage, whose logits golden data keeps
Integers = npt.NDArray[np.int64]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Passage:
    """A text, and how PyTorch predicts it."""

    tokens: tuple[int, ...]  # T of them
    likeliest: Integers  # (T - 1,) the token that PyTorch expects after each
    logprobs: npt.NDArray[np.float32]  # (T - 1,) of the token that comes
    rows: Integers  # positions whose logits are known
    logits: Logits  # (len(rows), V)

    def thin(self) -> Passage:
        """Return the passage with the logits of `GOLDEN_ROWS` positions."""
        keep = list(choose_evenly(len(self.rows), GOLDEN_ROWS))
        return Passage(self.tokens, self.likeliest, self.logprobs, self.rows[keep], self.logits[keep])


def cut_passages(
    encoded: Sequence[Sequence[int]], context: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Cut the joined texts into passages to judge with, and to calibrate with; a single one is both."""
    text = [token for tokens in encoded for token in tokens]
    length = min(PASSAGE_TOKENS, context)
    cut = [tuple(text[start : start + length]) for start in range(0, len(text) - 1, length)][:MOST_PASSAGES]
    judged = max(1, round(JUDGED * len(cut)))
    return cut[:judged], cut[judged:] or cut


def make_passage(tokens: tuple[int, ...], logits: Logits, passages: int = 1) -> Passage:
    """Return a passage, one of several, with as many of PyTorch's logits (T - 1, V) as memory allows each."""
    following = np.asarray(tokens[1:])
    logprobs = compute_logprobs(logits, following).astype(np.float32)
    allowed = max(1, LOGITS_BYTES // (passages * logits[0].nbytes))
    rows = np.array(choose_evenly(len(logits), allowed))
    return Passage(tokens, logits.argmax(-1), logprobs, rows, logits[rows])


def measure_text(got: Iterable[Logits], want: Sequence[Passage]) -> TextMetrics:
    """Compare the logits (T - 1, V) of each passage; the engine's are in memory for one passage at a time."""
    kl: list[Array] = []
    changed: list[npt.NDArray[np.bool_]] = []
    lost: list[npt.NDArray[np.float32]] = []  # of each token's log-probability
    rows = sum(len(passage.likeliest) for passage in want)
    for logits, passage in zip(got, want, strict=True):
        if not np.isfinite(logits).all():
            return TextMetrics(math.nan, 1.0, math.nan, False, rows)
        kl.append(measure_kl(passage.logits, logits[passage.rows]))
        changed.append(logits.argmax(-1) != passage.likeliest)
        own = compute_logprobs(logits, np.asarray(passage.tokens[1:])).astype(np.float32)
        lost.append(passage.logprobs - own)
    return summarize_text(kl, changed, lost)


def read_passages(decoder: Decoder, passages: Sequence[Passage]) -> Iterator[Logits]:
    """Yield the engine's logits (T - 1, V) of each passage."""
    for passage in passages:
        run = decoder.start(1, len(passage.tokens))
        yield np.concatenate(list(run.extend(passage.tokens[:-1], PREFILL_CHUNK)))


def to_arrays(passages: Sequence[Passage], whole: bool = False) -> dict[str, npt.NDArray[Any]]:
    """Return the passages as golden data keeps them, or `whole`."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for i, passage in enumerate(passages):
        stored = passage if whole else passage.thin()
        arrays |= {f"passage.{i}.{name}": np.asarray(value) for name, value in vars(stored).items()}
    return arrays


def from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[Passage, ...]:
    """Return the passages that `to_arrays` stored."""
    count = sum(name.startswith("passage.") and name.endswith(".tokens") for name in arrays)
    passages = []
    for i in range(count):
        tokens = tuple(int(token) for token in arrays[f"passage.{i}.tokens"])
        others = (arrays[f"passage.{i}.{name}"] for name in ("likeliest", "logprobs", "rows", "logits"))
        passages.append(Passage(tokens, *others))
    return tuple(passages)
