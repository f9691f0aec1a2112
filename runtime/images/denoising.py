"""Denoising: from noise to a picture's latents by what a model predicts, one step after the other.

S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .noise import Float32
from .noise_schedule import Float64

Draw: TypeAlias = Callable[[Sequence[int]], Float32]
Factors: TypeAlias = tuple[Float64, Float64]  # (S,) each: of the sample, and of the prediction
# The weights of the newest prediction and of those before it, by the step (Adams and Bashforth).
PLMS_WEIGHTS = (
    (1.0,),
    (1 / 2, 1 / 2),
    (3 / 2, -1 / 2),
    (23 / 12, -16 / 12, 5 / 12),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)


class Update(NamedTuple):
    """One step's factors: what the clean sample is made of, and what the next sample is made of."""

    sample_to_clean: float
    prediction_to_clean: float
    clean: float
    sample: float
    prediction: float
    kept: float  # the clean sample of the step before
    noise: float


@dataclass
class Scheduler:
    """Denoises one batch of pictures. Step 0 begins anew, and the others follow in order.

    Samples, predictions and noise are float32 arrays of one shape, such as (B, C, H, W).

    Attributes:
        timesteps: what the model reads, one for each step; those of Euler's have fractions.
        initial_sigma: what normal noise is multiplied by to begin a picture without another one.
        start: the factors of another picture and of noise, to begin with that picture.
        updates: the factors of each step.
        draws: the steps that draw noise are those before this.
        scales: what the model's input is multiplied by at each step; None leaves it.
        limit: the largest absolute value of a clean sample; None has none.
    """

    timesteps: Float32
    initial_sigma: float
    start: tuple[float, float]
    updates: Sequence[Update]
    draws: int = 0
    scales: Sequence[float] | None = None
    limit: float | None = None
    kept: Float32 | None = field(default=None, init=False)

    def scale(self, sample: Float32, index: int) -> Float32:
        """Return what the model reads for a sample."""
        return sample if self.scales is None else self.scales[index] * sample

    def begin(self, noise: Float32) -> Float32:
        """Return the sample that step 0 takes without another picture, of normal noise."""
        begun: Float32 = np.float32(self.initial_sigma) * noise
        return begun

    def add_noise(self, sample: Float32, noise: Float32) -> Float32:
        """Return the sample that step 0 takes for a picture's latents, with normal noise."""
        return self.start[0] * sample + self.start[1] * noise

    def step(self, index: int, prediction: Float32, sample: Float32, draw: Draw) -> Float32:
        """Return the next sample, a new array.

        Args:
            index: of the step.
            prediction: of the model, which may be overwritten afterwards.
            sample: what the step before returned, not what `scale` did; it must not be overwritten.
            draw: returns normal noise of a shape.
        """
        update = self.updates[index]
        following = update.sample * sample
        if update.prediction:
            following += update.prediction * prediction
        if update.clean:
            clean = update.sample_to_clean * sample
            clean += update.prediction_to_clean * prediction
            if self.limit is not None:
                np.clip(clean, -self.limit, self.limit, out=clean)
            following += update.clean * clean
            if update.kept and self.kept is not None:
                following += update.kept * self.kept
            self.kept = clean
        if index < self.draws:
            following += update.noise * draw(sample.shape)
        return following


@dataclass
class PlmsScheduler(Scheduler):
    """Predicts by the predictions of four steps. Step 1 does step 0 again, with the mean of both."""

    predictions: list[Float32] = field(default_factory=list, init=False)  # the newest first
    first: Float32 | None = field(default=None, init=False)

    def step(self, index: int, prediction: Float32, sample: Float32, draw: Draw) -> Float32:
        if index == 0:
            self.predictions, self.first = [], sample
        elif index == 1 and self.first is not None:
            sample, self.first = self.first, None
        recent = [prediction.copy(), *self.predictions[:3]]
        weights = PLMS_WEIGHTS[min(index, len(PLMS_WEIGHTS) - 1)]
        mixed = weights[0] * prediction
        for weight, other in zip(weights[1:], recent[1:], strict=True):
            mixed += weight * other
        if index != 1:
            self.predictions = recent
        return super().step(index, mixed, sample, draw)


def make_updates(clean_from: Factors, **factors: npt.ArrayLike) -> list[Update]:
    """Return the updates of S steps; a factor that is left out is 0."""
    names = Update._fields[2:]
    columns = np.broadcast_arrays(*clean_from, *(factors.get(name, 0.0) for name in names))
    return [Update(*row) for row in np.stack(columns, axis=1).astype(np.float64).tolist()]
