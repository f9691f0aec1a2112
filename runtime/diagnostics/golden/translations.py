"""An encoder-decoder's golden data, and how it is stored.

V vocabulary, L layers, H heads, D head size
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...decoding.beam import Hypothesis, Search
from ...decoding.constraints import Constraints
from ..metrics import Logits, VectorMetrics, measure_vectors
from .evenly import evenly
from .files import Arrays

GOLDEN_STEPS = 3
GOLDEN_POSITIONS = 2


@dataclass(frozen=True)
class Sample:
    """A source, and what PyTorch makes of it.

    Attributes:
        source: token ids, the end token included.
        target: PyTorch's likeliest tokens one by one, without the start token.
        margins: by how much it preferred each of them to the next best, in logits.
        steps: places in the target whose logits are known.
        logits: (len(steps), V) computed at once and without a cache.
        positions: places in the source whose keys and values are known.
        cross: (2 * L, len(positions), H * D) keys and values of every layer.
        attention: (L, H, len(steps), S) how much each of those places looks at the source; empty where no
            graph gives it.
        beams: the best targets that beam search finds, with their scores; of some samples only.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    margins: tuple[float, ...]
    steps: tuple[int, ...]
    logits: Logits
    positions: tuple[int, ...]
    cross: Logits
    attention: Logits
    beams: tuple[Hypothesis, ...] = ()

    @property
    def continuation(self) -> tuple[int, ...]:
        """What PyTorch continues the start token with."""
        return self.target

    def thin(self) -> Sample:
        """Return the sample with only some of the steps and positions, the first and last among them."""
        steps = evenly(len(self.steps), GOLDEN_STEPS)
        positions = evenly(len(self.positions), GOLDEN_POSITIONS)
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
    """What every engine must reproduce.

    Attributes:
        samples: texts; then a source of one token, and one of as many as the model reads with a target
            of as many as it writes.
        search: how `Sample.beams` were found.
    """

    samples: tuple[Sample, ...]
    search: Search


def measure_cross(got: Sequence[Logits], want: Sequence[Logits]) -> VectorMetrics:
    """Return the worst of all layers' keys and values, each in units of its own spread."""
    sides = [np.concatenate(list(side), axis=1) for side in (got, want)]
    return worst_of([measure_vectors(a, b) for a, b in zip(*sides, strict=True)])


def measure_attention(got: Sequence[Logits], want: Sequence[Logits]) -> VectorMetrics:
    """Return the worst of all samples; a vector is what one target token attends to in a layer and head."""
    found = [
        measure_vectors(a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]))
        for a, b in zip(got, want, strict=True)
    ]
    return worst_of(found)


def worst_of(found: Sequence[VectorMetrics]) -> VectorMetrics:
    """Return the largest of each metric; not finite if one is not."""
    if not all(each.finite for each in found):
        return VectorMetrics(math.nan, math.nan, math.nan, False, sum(each.rows for each in found))
    return VectorMetrics(
        max(each.max_error for each in found),
        max(each.cosine_gap for each in found),
        max(each.mean_cosine_gap for each in found),
        True,
        sum(each.rows for each in found),
    )


def to_arrays(golden: Golden) -> dict[str, npt.NDArray[Any]]:
    """Return sources, targets and some of the numbers, as golden data stores them."""
    search = golden.search
    arrays: dict[str, npt.NDArray[Any]] = {
        "search": np.array([search.num_beams, search.max_new_tokens]),
        "eos": np.array(search.constraints.eos),
        "suppressed": np.array(search.constraints.suppressed, np.int64),
    }
    for i, sample in enumerate(golden.samples):
        thin = sample.thin()
        for name in ("source", "target", "margins", "steps", "logits", "positions", "cross", "attention"):
            arrays[f"sample.{i}.{name}"] = np.array(getattr(thin, name))
        for k, beam in enumerate(sample.beams):
            arrays[f"sample.{i}.beam.{k}"] = np.array(beam.token_ids)
            arrays[f"sample.{i}.beam_score.{k}"] = np.array(beam.score)
    return arrays


def from_arrays(arrays: Arrays) -> Golden:
    """Return the golden data that `to_arrays` stored.

    Raises:
        KeyError: an array is missing.
    """

    def integers(name: str) -> tuple[int, ...]:
        return tuple(int(number) for number in arrays[name])

    beams, steps = integers("search")
    constraints = Constraints(eos=integers("eos"), suppressed=integers("suppressed"))
    search = Search(num_beams=beams, n_best=beams, max_new_tokens=steps, constraints=constraints)
    samples = []
    for i in range(sum(name.endswith(".source") for name in arrays)):
        found = sum(name.startswith(f"sample.{i}.beam.") for name in arrays)
        samples.append(
            Sample(
                source=integers(f"sample.{i}.source"),
                target=integers(f"sample.{i}.target"),
                margins=tuple(float(margin) for margin in arrays[f"sample.{i}.margins"]),
                steps=integers(f"sample.{i}.steps"),
                logits=arrays[f"sample.{i}.logits"],
                positions=integers(f"sample.{i}.positions"),
                cross=arrays[f"sample.{i}.cross"],
                attention=arrays[f"sample.{i}.attention"],
                beams=tuple(
                    Hypothesis(
                        integers(f"sample.{i}.beam.{k}"), float(arrays[f"sample.{i}.beam_score.{k}"]), "eos"
                    )
                    for k in range(found)
                ),
            )
        )
    return Golden(tuple(samples), search)
