"""From noise to latents, step by step: what is asked of the UNet, and what the scheduler makes of it.

N pictures, T tokens, E text features, L channels of latents, H and W height and width of latents
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..backends.part import Part
from ..bundle.image_defaults import ImageDefaults
from .denoising import Draw, Scheduler
from .noise import Float32

GUIDANCE_UNIT = 1000.0  # the waves of an embedded guidance scale are those of so many time steps
LONGEST_WAVE = 10_000.0


def denoise(
    scheduler: Scheduler, latents: Float32, predict: Callable[[Float32, float], Float32], draw: Draw
) -> Iterator[Float32]:
    """Yield the latents (N, L, H, W) behind each step.

    Args:
        scheduler: a new one.
        latents: to begin with.
        predict: the model's prediction for latents, as the scheduler scales them, at a time step.
        draw: returns normal noise of a shape.
    """
    for index, timestep in enumerate(scheduler.timesteps):
        prediction = predict(scheduler.scale(latents, index), float(timestep))
        latents = scheduler.step(index, prediction, latents, draw)
        yield latents


def predict(
    unet: Part, defaults: ImageDefaults, sample: Float32, timestep: float, text: Float32, scale: float
) -> Float32:
    """Return the UNet's prediction (N, L, H, W), with guidance where the texts are twice as many.

    Args:
        unet: the opened graph.
        defaults: of the bundle.
        sample: (N, L, H, W) latents as the scheduler scales them.
        timestep: from 0 to 999.
        text: (N, T, E) hidden states of prompts, or (2 N, T, E) with those of negative prompts before them.
        scale: by how much prompts count more than negative ones.
    """
    count = len(sample)
    rows = sample if len(text) == count else np.concatenate([sample, sample])
    values = {"sample": rows, "timestep": np.full(len(rows), timestep, np.float32), "text": text}
    if defaults.guidance_features is not None:
        values["guidance"] = embed_guidance(scale, defaults.guidance_features, len(rows))
    noise = unet.run(values)["noise"]
    if len(rows) == count:
        return noise
    away, towards = noise[:count], noise[count:]
    guided: Float32 = away + np.float32(scale) * (towards - away)
    return guided


def embed_guidance(scale: float, features: int, rows: int) -> Float32:
    """Return the waves (rows, features) of a guidance scale, as latent consistency models read it."""
    half = features // 2
    powers = np.exp(np.arange(half, dtype=np.float32) * np.float32(-np.log(LONGEST_WAVE) / (half - 1)))
    angles = np.float32((scale - 1) * GUIDANCE_UNIT) * powers
    waves = np.concatenate([np.sin(angles), np.cos(angles), np.zeros(features % 2, np.float32)])
    return np.broadcast_to(waves, (rows, features)).astype(np.float32)
