"""sd-demo's pictures show what their captions say, in every precision; its steps are those of diffusers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline

from planforge.exporter import export
from planforge.exporter.checkpoints.source import DEMOS
from planforge.models.demos import digits
from planforge.runtime import ImageGenerator
from planforge.runtime.images.schedulers import SCHEDULERS

COUNT = 120
BATCH = 60
PICTURES: dict[str, Any] = {"steps": 20, "guidance_scale": 2.0}
STEPS = 20
LEAST_RIGHT = 0.9
MOST_LOST = 0.01
FACTOR = 4  # of PyTorch's own error, which another order of sums may have several times
MOST_OFF = 1e-3  # of the latents' standard deviation, at each step


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sd-demo") / "bundle"
    export("sd-demo", folder, target=["cpu", "portable"], precision=["fp32", "fp16", "int8"])
    return folder


@pytest.fixture(scope="module")
def asked() -> tuple[list[str], Any, Any]:
    """Captions, and their digits and colours."""
    random = np.random.default_rng(7)
    numbers = random.integers(10, size=COUNT)
    colours = random.integers(len(digits.NAMES), size=COUNT)
    texts = [digits.caption(int(n), int(c), random) for n, c in zip(numbers, colours, strict=True)]
    return texts, numbers, colours


@pytest.fixture(scope="module")
def found(bundle: Path, asked: tuple[list[str], Any, Any]) -> dict[str, tuple[Any, Any]]:
    """What a reader that never saw the training digits finds in the pictures of each precision."""
    texts, _, _ = asked
    reader = digits.Reader.train()
    read = {}
    for precision in ("fp32", "fp16", "int8"):
        with ImageGenerator.load(bundle, precision=precision) as model:
            made = [
                picture.pixels
                for first in range(0, COUNT, BATCH)
                for picture in model.generate(texts[first : first + BATCH], seed=first, **PICTURES)
            ]
        read[precision] = reader.read((np.stack(made).transpose(0, 3, 1, 2) / 127.5 - 1).astype(np.float32))
    return read


def test_pictures_show_their_captions(found: Any, asked: tuple[list[str], Any, Any]) -> None:
    _, numbers, colours = asked
    shown, tints = found["fp32"]
    assert (shown == numbers).mean() >= LEAST_RIGHT
    assert (tints == colours).mean() >= LEAST_RIGHT
    # Of others' captions about a tenth have the digit, and a sixth the colour; four deviations are more.
    for read, wanted, kinds in ((shown, numbers, 10), (tints, colours, len(digits.NAMES))):
        chance = 1 / kinds
        most = chance + 4 * (chance * (1 - chance) / COUNT) ** 0.5
        assert (read == np.roll(wanted, 1)).mean() <= most


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_other_precisions_lose_little(precision: str, found: Any, asked: tuple[list[str], Any, Any]) -> None:
    for part in (0, 1):
        right = {name: (found[name][part] == asked[part + 1]).mean() for name in ("fp32", precision)}
        assert right[precision] >= right["fp32"] - MOST_LOST


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[ImageGenerator]:
    with ImageGenerator.load(bundle, precision="fp32") as opened:
        yield opened


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("strength", [None, 0.6])
@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "lcm"])
def test_each_step_is_that_of_diffusers(
    name: str, strength: float | None, scale: float, model: ImageGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a multiple of what float32 differs from float64 in PyTorch itself."""
    wanted = {
        dtype: run_diffusers(name, strength, scale, dtype, monkeypatch) for dtype in ("float32", "float64")
    }
    start = {} if strength is None else {"image": draw_start(), "strength": strength}
    ours: list[Any] = []
    options: dict[str, Any] = {"steps": STEPS, "seed": 3, "scheduler": name, "guidance_scale": scale, **start}
    model.generate("a red three", on_step=lambda step: ours.append(step.latents.copy()), **options)
    assert len(ours) == len(wanted["float32"])
    for got, theirs, exact in zip(ours, wanted["float32"], wanted["float64"], strict=True):
        deviation = exact.std()
        allowed = FACTOR * np.abs(theirs - exact).max() + 1e-5 * deviation
        assert allowed <= MOST_OFF * deviation
        assert np.abs(got - exact).max() <= allowed


@cache
def load_diffusers(reads_picture: bool, dtype: str) -> Any:
    """Return diffusers' pipeline, with the settings of its scheduler as `own`."""
    kind = StableDiffusionImg2ImgPipeline if reads_picture else StableDiffusionPipeline
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers tells of its own deprecations
        pipeline: Any = kind.from_pretrained(DEMOS / "sd-demo", torch_dtype=getattr(torch, dtype))
    pipeline.set_progress_bar_config(disable=True)
    pipeline.own = dict(pipeline.scheduler.config)
    return pipeline


def draw_start() -> Any:
    """A picture to begin with."""
    return np.random.default_rng(1).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def run_diffusers(
    name: str, strength: float | None, scale: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Return the latents behind each step of diffusers' pipeline, of the same noise in either type."""
    draw = torch.randn

    def draw_single(*shape: Any, dtype: Any = None, **options: Any) -> torch.Tensor:
        """What is drawn in float64 are other numbers."""
        return draw(*shape, dtype=torch.float32, **options).to(dtype or torch.float32)

    monkeypatch.setattr(torch, "randn", draw_single)
    pipeline = load_diffusers(strength is not None, dtype)
    scheduler = SCHEDULERS[name]
    found = getattr(diffusers, scheduler.class_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it hands tensors to np.array
        pipeline.scheduler = found.from_config(pipeline.own, **scheduler.forced)
    kept: list[Any] = []

    def keep(pipeline: Any, number: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        kept.append(values["latents"].double().numpy().copy())
        return values

    start: dict[str, Any] = {"height": 32, "width": 32}
    if strength is not None:
        pixels = torch.from_numpy(draw_start().astype(np.float32) / np.float32(255)).permute(2, 0, 1)[None]
        start = {"image": pixels.to(getattr(torch, dtype)), "strength": strength}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline(
            "a red three",
            num_inference_steps=STEPS,
            guidance_scale=scale,
            generator=torch.Generator().manual_seed(3),
            callback_on_step_end=keep,
            output_type="latent",
            **start,
        )
    return kept
