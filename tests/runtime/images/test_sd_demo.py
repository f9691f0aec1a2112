"""sd-demo's pictures show what their captions say, in every precision; its steps are those of diffusers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.exporter import export
from planforge.exporter.checkpoints.source import DEMOS
from planforge.models.demos import digits
from planforge.runtime import ImageGenerator
from planforge.runtime.images.schedulers import SCHEDULERS

from ...helpers.trajectories import Way, compare_trajectory

COUNT = 120
BATCH = 60
PICTURES: dict[str, Any] = {"steps": 20, "guidance_scale": 2.0}
STEPS = 20
LEAST_RIGHT = 0.9
MOST_LOST = 0.01


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
@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "lcm"])  # for models of its own
def test_each_step_is_that_of_diffusers(
    name: str, strength: float | None, scale: float, model: ImageGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = Way("a red three", name, STEPS, scale, strength)
    compare_trajectory(model, DEMOS / "sd-demo", way, monkeypatch)
