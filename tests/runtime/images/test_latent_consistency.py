"""A latent consistency model from its folder to pictures, against diffusers' own pipelines."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    LatentConsistencyModelImg2ImgPipeline,
    LatentConsistencyModelPipeline,
    LCMScheduler,
    UNet2DConditionModel,
)

from planforge.exporter import export
from planforge.runtime import ImageGenerator

from ...helpers.diffusion import SCHEDULER, SMALL, UNET, make_pipeline
from ...helpers.pictures import ask_pipeline, compare_pictures
from ...helpers.trajectories import Way, compare_trajectory

STEPS = 3
KINDS = ("LatentConsistencyModelPipeline", "LatentConsistencyModelImg2ImgPipeline")


@pytest.fixture(scope="module")
def pipeline() -> LatentConsistencyModelPipeline:
    parts = make_pipeline(unet=SMALL).components
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers tells of its own deprecations
        unet = UNet2DConditionModel(**UNET | SMALL, time_cond_proj_dim=32).eval()
        scheduler = LCMScheduler(**{name: SCHEDULER[name] for name in SCHEDULER if name != "skip_prk_steps"})
        own = {**parts, "unet": unet, "scheduler": scheduler}
        found = LatentConsistencyModelPipeline(**own, requires_safety_checker=False)
    found.set_progress_bar_config(disable=True)
    return found


@pytest.fixture(scope="module")
def model(pipeline: LatentConsistencyModelPipeline, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("lcm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline.save_pretrained(folder / "checkpoint")
    export(folder / "checkpoint", folder / "bundle", target="portable", precision="fp32")
    with ImageGenerator.load(folder / "bundle") as opened:
        yield opened


@pytest.mark.parametrize("scale", [8.5, 2.0])
def test_text_to_image(model: ImageGenerator, pipeline: Any, scale: float) -> None:
    pictures = model.generate("a red one", steps=STEPS, seed=3, guidance_scale=scale)
    compare_pictures(
        pictures, ask_pipeline(pipeline, "a red one", 3, STEPS, guidance_scale=scale, height=32, width=32)
    )


def test_image_to_image(model: ImageGenerator, pipeline: Any) -> None:
    start = np.random.default_rng(0).random((1, 32, 40, 3), dtype=np.float32).round(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = LatentConsistencyModelImg2ImgPipeline(**pipeline.components, requires_safety_checker=False)
    theirs.set_progress_bar_config(disable=True)
    pixels = (start[0] * 255).round().astype(np.uint8)
    given = pixels[None].astype(np.float32) / 255
    pictures = model.generate("a red one", steps=STEPS, seed=4, image=pixels, strength=0.6)
    compare_pictures(pictures, ask_pipeline(theirs, "a red one", 4, STEPS, image=given, strength=0.6))


@pytest.mark.parametrize("strength", [None, 0.6])
def test_each_step_is_that_of_diffusers(
    strength: float | None, model: ImageGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = model.bundle.folder.parent / "checkpoint"
    compare_trajectory(model, checkpoint, Way("a red one", "lcm", 5, 8.5, strength, KINDS), monkeypatch)


def test_defaults_are_those_of_such_models(model: ImageGenerator) -> None:
    assert (model.defaults.steps, model.defaults.guidance_scale) == (4, 8.5)
    assert model.scheduler.class_name == "LCMScheduler"
