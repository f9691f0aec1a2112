"""How a decoder takes the steps of a batch, and the error of what it gives.

B rows of a batch, K tokens whose logits are known
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...bundle.manifest import Artifact
from ...decoding.cache import NONE_PENDING, PendingContext
from ...decoding.cache_shapes import PREFILL_CHUNK
from ...decoding.decoder import Decoder, DecoderRun
from .metrics import Logits

PREFIX = "drawn."  # of the limits' names
PLACES = 3  # of each source, whose keys and values are known
SPARE = 8  # slots of a cache behind what a batch needs


@dataclass(frozen=True)
class Batch:
    """Rows that a decoder reads together, in several steps."""

    texts: tuple[int, ...]  # which of the texts each row reads
    ends: tuple[tuple[int, ...], ...]  # of each step, how many tokens each row has read behind it
    # Where it is not 0, the first step is a past: it is read once for all rows, and its keys and values are
    # there so many times.
    repeats: int = 0

    @property
    def columns(self) -> int:
        """How many tokens wide a cache gets in which all rows are padded in each step."""
        begins = ((0,) * len(self.texts), *self.ends)
        first, *others = [
            max(after - before for before, after in zip(*ends, strict=True))
            for ends in zip(begins, self.ends, strict=False)
        ]
        return first * max(1, self.repeats) + sum(others)


def take_step(run: DecoderRun, rows: Sequence[Sequence[int]], has_past: bool) -> Logits:
    """Run each row's tokens on top of what it has read; return the logits (B, V) behind the last of each."""
    width = max(map(len, rows))
    if width == 1:
        return run.decode([tokens[0] for tokens in rows])
    return run.prefill(rows, choose_chunk(run.decoder.artifact, len(rows), width, has_past))


def choose_chunk(artifact: Artifact, rows: int, width: int, has_past: bool) -> int:
    """Return how many tokens of each row a graph reads in one run.

    A translator's graph whose kernel takes one behind a past reads one, and without a past all of them.
    """
    if artifact.dialect != "ort" or not artifact.reads_source or rows == 1:
        return PREFILL_CHUNK
    return 1 if has_past else width


def start_on_past(
    decoder: Decoder,
    tokens: Sequence[int],
    pasts: Sequence[int],
    capacity: int,
    context: PendingContext = NONE_PENDING,
) -> DecoderRun:
    """Return a run whose rows have read so many of some tokens, which are read once."""
    if decoder.artifact.window is None:
        run = decoder.start(1, capacity, context, copies=len(pasts))
        run.prefill([tokens[: max(pasts)]])
        run.spread()
        for row, past in enumerate(pasts):
            run.truncate_row(row, past)
        return run
    run = decoder.start(len(pasts), capacity)  # what a window needs of shorter ones is gone
    for row, past in enumerate(pasts):
        for begin in range(0, past, PREFILL_CHUNK):
            run.extend_row(row, tokens[begin : min(begin + PREFILL_CHUNK, past)])
    return run


def measure_error(got: Logits, want: Logits, scale: float) -> float:
    """Return the largest difference in units of `scale`; infinite where a number is not finite."""
    error = float(np.abs(got.astype(np.float64) - want).max()) / scale
    return error if math.isfinite(error) else math.inf
