"""An encoder-decoder's golden data, and how it is stored.

V vocabulary, L layers, H heads, D head size
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...decoding.beam import Hypothesis, Search
from ...decoding.constraints import Constraints
from . import draws
from .draws import Draws
from .files import Arrays, choose_evenly
from .metrics import Logits, VectorMetrics, measure_vectors

GOLDEN_STEPS = 3
GOLDEN_POSITIONS = 2


@dataclass(frozen=True)
class Sample:
    """A source, and what PyTorch makes of it."""

    source: tuple[int, ...]  # token ids, the end token included
    target: tuple[int, ...]  # PyTorch's likeliest tokens one by one, without the start token
    margins: tuple[float, ...]  # by how much it preferred each of them to the next best, in logits
    steps: tuple[int, ...]  # places in the target whose logits are known
    logits: Logits  # (len(steps), V) computed at once and without a cache
    positions: tuple[int, ...]  # places in the source whose keys and values are known
    cross: Logits  # (2 * L, len(positions), H * D) keys and values of every layer
    attention: Logits  # (L, H, len(steps), S) of each step to the source; empty where no graph gives it
    beams: tuple[Hypothesis, ...] = ()  # the best that beam search finds; of some samples only

    @property
    def continuation(self) -> tuple[int, ...]:
        """What PyTorch continues the start token with."""
        return self.target

    def thin(self) -> Sample:
        """Return the sample with only some of the steps and positions, the first and last among them."""
        steps = choose_evenly(len(self.steps), GOLDEN_STEPS)
        positions = choose_evenly(len(self.positions), GOLDEN_POSITIONS)
        return replace(
            self,
            steps=tuple(self.steps[i] for i in steps),
            logits=self.logits[list(steps)],
            positions=tuple(self.positions[i] for i in positions),
            cross=self.cross[:, list(positions)],
            attention=self.attention[:, :, list(steps)],
        )


@dataclass(frozen=True)
class Golden:
    """What every engine must reproduce."""

    samples: tuple[Sample, ...]  # texts; then a source of one token; then the longest source and target
    search: Search  # how `Sample.beams` were found
    # Batches of random shapes; None in golden data of earlier versions, and where nothing was drawn.
    draws: Draws | None = field(default=None, kw_only=True)


def measure_cross(got: Sequence[Logits], want: Sequence[Logits]) -> VectorMetrics:
    """Return the worst of all layers' keys and values, each in units of its own spread."""
    sides = [np.concatenate(list(side), axis=1) for side in (got, want)]
    return find_worst([measure_vectors(a, b) for a, b in zip(*sides, strict=True)])


def measure_attention(got: Sequence[Logits], want: Sequence[Logits]) -> VectorMetrics:
    """Return the worst of all samples; a vector is what one target token attends to in a layer and head."""
    flat = [[array.reshape(-1, array.shape[-1]) for array in side] for side in (got, want)]
    return find_worst([measure_vectors(a, b) for a, b in zip(*flat, strict=True)])


def find_worst(measured: Sequence[VectorMetrics]) -> VectorMetrics:
    """Return the largest of each metric; not finite if one is not."""
    rows = sum(each.rows for each in measured)
    if not all(each.finite for each in measured):
        return VectorMetrics(math.nan, math.nan, math.nan, False, rows)
    return VectorMetrics(
        max(each.max_error for each in measured),
        max(each.cosine_gap for each in measured),
        max(each.mean_cosine_gap for each in measured),
        True,
        rows,
    )


def to_arrays(golden: Golden, whole: bool = False) -> dict[str, npt.NDArray[Any]]:
    """Return sources, targets and some of the numbers, as golden data stores them; all if `whole`."""
    search = golden.search
    arrays: dict[str, npt.NDArray[Any]] = {
        "search": np.array([search.num_beams, search.max_new_tokens]),
        "eos": np.array(search.constraints.eos),
        "suppressed": np.array(search.constraints.suppressed, np.int64),
    }
    for i, sample in enumerate(golden.samples):
        stored = sample if whole else sample.thin()
        for name in ("source", "target", "margins", "steps", "logits", "positions", "cross", "attention"):
            arrays[f"sample.{i}.{name}"] = np.asarray(getattr(stored, name))
        for k, beam in enumerate(sample.beams):
            arrays[f"sample.{i}.beam.{k}"] = np.array(beam.token_ids)
            arrays[f"sample.{i}.beam_score.{k}"] = np.array(beam.score)
    return arrays | draws.to_arrays(golden.draws)


def from_arrays(arrays: Arrays) -> Golden:
    """Return the golden data that `to_arrays` stored; a KeyError names an array that is missing."""
    beams, steps = arrays["search"].tolist()
    constraints = Constraints(
        eos=tuple(arrays["eos"].tolist()), suppressed=tuple(arrays["suppressed"].tolist())
    )
    search = Search(num_beams=beams, n_best=beams, max_new_tokens=steps, constraints=constraints)
    count = sum(name.endswith(".source") for name in arrays)
    samples = tuple(read_sample(arrays, f"sample.{i}") for i in range(count))
    return Golden(samples, search, draws=draws.from_arrays(arrays))


def read_sample(arrays: Arrays, stem: str) -> Sample:
    """Return the sample whose arrays have names that begin with `stem`."""
    beams = sum(name.startswith(f"{stem}.beam.") for name in arrays)
    hypotheses = [
        Hypothesis(tuple(arrays[f"{stem}.beam.{k}"].tolist()), float(arrays[f"{stem}.beam_score.{k}"]), "eos")
        for k in range(beams)
    ]
    return Sample(
        source=tuple(arrays[f"{stem}.source"].tolist()),
        target=tuple(arrays[f"{stem}.target"].tolist()),
        margins=tuple(float(margin) for margin in arrays[f"{stem}.margins"]),
        steps=tuple(arrays[f"{stem}.steps"].tolist()),
        logits=arrays[f"{stem}.logits"],
        positions=tuple(arrays[f"{stem}.positions"].tolist()),
        cross=arrays[f"{stem}.cross"],
        attention=arrays[f"{stem}.attention"],
        beams=tuple(hypotheses),
    )
