"""Latents behind each step, beside those of diffusers' pipelines from the same noise."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import numpy.typing as npt
import pytest
import torch

from planforge.runtime import ImageGenerator
from planforge.runtime.images.schedulers import SCHEDULERS

FACTOR = 4  # of PyTorch's own error, which another order of sums may have several times
MOST_OFF = 1e-3  # of the latents' standard deviation, at each step
SEED = 3
SIDE = 32  # of the pictures


@dataclass(frozen=True)
class Way:
    """One way from noise to a picture.

    Attributes:
        prompt: the text.
        scheduler: its name here.
        steps: of a way from noise alone.
        scale: of guidance.
        strength: how much of a random picture is made anew; None for a way from noise alone.
        kinds: the names of diffusers' pipelines for texts, and for texts and pictures.
    """

    prompt: str
    scheduler: str
    steps: int
    scale: float
    strength: float | None = None
    kinds: tuple[str, str] = ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline")


def compare_trajectory(
    model: ImageGenerator, checkpoint: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail unless each step is that of diffusers, within a multiple of float32's distance from float64."""
    single, double = (run_diffusers(checkpoint, way, name, monkeypatch) for name in ("float32", "float64"))
    ours: list[Any] = []
    options: dict[str, Any] = {"steps": way.steps, "scheduler": way.scheduler, "guidance_scale": way.scale}
    options |= {"height": SIDE, "width": SIDE} if way.strength is None else {}
    options |= {} if way.strength is None else {"image": draw_start(), "strength": way.strength}
    model.generate(way.prompt, seed=SEED, on_step=lambda step: ours.append(step.latents.copy()), **options)
    assert len(ours) == len(single) > 0
    for got, theirs, exact in zip(ours, single, double, strict=True):
        deviation = exact.std()
        allowed = FACTOR * np.abs(theirs - exact).max() + 1e-5 * deviation
        assert allowed <= MOST_OFF * deviation
        assert np.abs(got - exact).max() <= allowed


def draw_start() -> npt.NDArray[np.uint8]:
    """Return a picture to begin with."""
    return np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


@cache
def load_diffusers(checkpoint: Path, kind: str, dtype: str) -> Any:
    """Return diffusers' pipeline of a checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers tells of its own deprecations
        pipeline: Any = getattr(diffusers, kind).from_pretrained(
            checkpoint, torch_dtype=getattr(torch, dtype)
        )
    return pipeline


def run_diffusers(checkpoint: Path, way: Way, dtype: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the latents behind each step of diffusers' pipeline, of the same noise in either type."""
    draw = torch.randn

    def draw_single(*shape: Any, dtype: Any = None, **options: Any) -> torch.Tensor:
        """Draw in float32, as float64 has other numbers."""
        return draw(*shape, dtype=torch.float32, **options).to(dtype or torch.float32)

    pipeline = load_diffusers(checkpoint, way.kinds[way.strength is not None], dtype)
    scheduler = SCHEDULERS[way.scheduler]
    kept: list[Any] = []

    def keep(pipeline: Any, number: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        kept.append(values["latents"].double().numpy().copy())
        return values

    start: dict[str, Any] = {"height": SIDE, "width": SIDE}
    if way.strength is not None:
        pixels = torch.from_numpy(draw_start().astype(np.float32) / np.float32(255)).permute(2, 0, 1)[None]
        start = {"image": pixels.to(getattr(torch, dtype)), "strength": way.strength}
    with warnings.catch_warnings(), monkeypatch.context() as patch:
        warnings.simplefilter("ignore")  # it hands tensors to np.array
        patch.setattr(torch, "randn", draw_single)
        found = getattr(diffusers, scheduler.class_name)
        parts = {
            **pipeline.components,
            "scheduler": found.from_config(pipeline.scheduler.config, **scheduler.forced),
        }
        # A new pipeline, as its constructor mends settings of its scheduler.
        own = type(pipeline)(**parts, requires_safety_checker=False)
        own.set_progress_bar_config(disable=True)
        own(
            way.prompt,
            num_inference_steps=way.steps,
            guidance_scale=way.scale,
            generator=torch.Generator().manual_seed(SEED),
            callback_on_step_end=keep,
            output_type="latent",
            **start,
        )
    return kept
