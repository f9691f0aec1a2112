"""The generator of pictures against diffusers' pipelines: the same pictures for the same seeds."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from diffusers import StableDiffusionPipeline

from planforge.runtime import BackendError, DataError, InputError, MemoryLimitError, load
from planforge.runtime.backends.ort_backend import OrtCpuBackend
from planforge.runtime.backends.ort_program import OrtProgram
from planforge.runtime.backends.part import Part
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact
from planforge.runtime.errors import ClosedError
from planforge.runtime.images.image_generator import ImageGenerator, Step
from planforge.runtime.images.pictures import MAX_PIXELS
from planforge.runtime.images.schedulers import SCHEDULERS

from ...helpers.cli import error_line
from ...helpers.pictures import ask_pipeline, compare_pictures
from ...helpers.trajectories import Way, compare_trajectory

MAX_SIDE = int(MAX_PIXELS**0.5)

STEPS = 5


@pytest.fixture(scope="module")
def generator(picture_bundle: Path) -> Iterator[ImageGenerator]:
    with load(picture_bundle, threads=1) as model:
        assert isinstance(model, ImageGenerator)
        yield model


@pytest.fixture(scope="module")
def pipeline(picture_bundle: Path) -> StableDiffusionPipeline:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers tells of its own deprecations
        found = StableDiffusionPipeline.from_pretrained(picture_bundle.parent / "checkpoint")
    found.set_progress_bar_config(disable=True)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"negative_prompt": "the"},
        {"guidance_scale": 1.0},
        {"guidance_scale": 3.0, "negative_prompt": "one"},
        {"height": 24, "width": 40},
        {"num_images": 3},
    ],
    ids=str,
)
def test_text_to_image(
    generator: ImageGenerator, pipeline: StableDiffusionPipeline, options: dict[str, Any]
) -> None:
    theirs = {"height": 32, "width": 32, **options}
    if "num_images" in options:
        theirs["num_images_per_prompt"] = theirs.pop("num_images")
    pictures = generator.generate("a red one", steps=STEPS, seed=7, **options)
    compare_pictures(pictures, ask_pipeline(pipeline, "a red one", 7, STEPS, **theirs))
    assert {picture.seed for picture in pictures} == {7}


def test_several_prompts(generator: ImageGenerator, pipeline: StableDiffusionPipeline) -> None:
    prompts = ["a red one", "the other"]
    pictures = generator.generate(prompts, steps=STEPS, seed=3, negative_prompt=["", "red"])
    wanted = ask_pipeline(pipeline, prompts, 3, STEPS, negative_prompt=["", "red"], height=32, width=32)
    compare_pictures(pictures, wanted)
    assert [picture.prompt for picture in pictures] == prompts


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("strength", [None, 0.6])
@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "lcm"])  # for models of its own
def test_each_step_is_that_of_diffusers(
    name: str,
    strength: float | None,
    scale: float,
    generator: ImageGenerator,
    picture_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way = Way("a red one", name, STEPS, scale, strength)
    compare_trajectory(generator, picture_bundle.parent / "checkpoint", way, monkeypatch)


def draw_picture(height: int, width: int) -> PIL.Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def test_a_picture_is_read_in_each_form(generator: ImageGenerator, tmp_path: Path) -> None:
    picture = draw_picture(35, 33)  # rounded down to what the model makes
    picture.save(tmp_path / "start.png")
    forms: list[Any] = [
        picture,
        np.asarray(picture),
        tmp_path / "start.png",
        str(tmp_path / "start.png"),
        (tmp_path / "start.png").read_bytes(),
    ]
    made = [generator.generate("one", steps=2, seed=1, image=form)[0].pixels for form in forms]
    assert made[0].shape == (32, 32, 3)
    assert all(np.array_equal(one, made[0]) for one in made)


def test_a_picture_is_saved(generator: ImageGenerator, tmp_path: Path) -> None:
    (picture,) = generator.generate("one", steps=1, seed=1)
    picture.save(tmp_path / "one.png")
    assert np.array_equal(np.asarray(PIL.Image.open(tmp_path / "one.png")), picture.pixels)
    assert picture.encode() == (tmp_path / "one.png").read_bytes()
    with pytest.raises(InputError, match=r"end it with \.png"):
        picture.save(tmp_path / "one.nothing")
    with pytest.raises(InputError, match=r"the folder .*none does not exist"):
        picture.save(tmp_path / "none" / "one.png")
    assert repr(picture) == "Picture(prompt='one', seed=1, dropped=0)"


def test_steps_are_told_and_a_call_can_be_ended(generator: ImageGenerator) -> None:
    told: list[Step] = []
    pictures = generator.generate("one", steps=4, seed=1, scheduler="ddim", on_step=told.append)
    assert [(step.number, step.count) for step in told] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert told[-1].seconds_left == 0 < told[0].seconds_left
    assert np.array_equal(told[-1].preview()[0].pixels, pictures[0].pixels)
    assert not np.array_equal(told[0].preview()[0].pixels, pictures[0].pixels)

    def stop(step: Step) -> None:
        if step.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate("one", steps=4, seed=1, on_step=stop)
    again = generator.generate("one", steps=4, seed=1, scheduler="ddim")
    assert np.array_equal(again[0].pixels, pictures[0].pixels)


def test_seeds(generator: ImageGenerator) -> None:
    one, two, three = (generator.generate("one", steps=1, seed=seed)[0].pixels for seed in (1, 1, 2))
    assert np.array_equal(one, two)
    assert not np.array_equal(one, three)
    drawn = [generator.generate("one", steps=1)[0] for _ in range(2)]
    assert drawn[0].seed != drawn[1].seed
    (again,) = generator.generate("one", steps=1, seed=drawn[0].seed)
    assert np.array_equal(again.pixels, drawn[0].pixels)


def test_what_is_cut_of_a_long_prompt_is_told(
    generator: ImageGenerator, pipeline: StableDiffusionPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = "one red the " * 9
    with caplog.at_level(logging.WARNING, "planforge"):
        pictures = generator.generate(prompt, steps=STEPS, seed=2)
    assert pictures[0].dropped == 13
    assert "13 tokens more than the 16 that the model reads" in caplog.text
    compare_pictures(pictures, ask_pipeline(pipeline, prompt, 2, STEPS, height=32, width=32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 30}, "height=30 is not a multiple of 4"),
        ({"width": 0}, "width=0 must be"),
        ({"height": 1e9}, "height=1000000000.0 must be"),
        ({"steps": 1001}, "steps=1001 must be"),
        ({"steps": 0}, "steps=0 must be"),
        ({"strength": 0.5}, "strength is of an image to begin with"),
        ({"image": draw_picture(32, 32), "strength": 1.5}, "strength=1.5 must be"),
        ({"image": draw_picture(32, 32), "strength": 0.01, "steps": 5}, "leaves none"),
        ({"image": draw_picture(3, 32)}, "at least 4 x 4"),
        ({"image": np.zeros((8, 8), np.uint8)}, r"array \(8, 8\) of uint8"),
        ({"image": np.zeros((8, 8, 3), np.float32)}, "of float32"),
        ({"image": 7}, "not int"),
        ({"image": "nowhere.png"}, r"nowhere\.png does not exist"),
        ({"guidance_scale": -1}, "guidance_scale=-1 must be"),
        ({"guidance_scale": float("nan")}, "guidance_scale=nan must be"),
        ({"num_images": 0}, "num_images=0 must be"),
        ({"num_images": 65}, "num_images=65 must be"),
        ({"scheduler": "dimm"}, "did you mean 'ddim'"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"negative_prompt": ["a", "b"]}, "2 negative prompts and 1 prompts"),
        ({"negative_prompt": [7]}, "negative_prompt must be a text or texts, not 7"),
        ({"on_step": 7}, "on_step=7 must be a function"),
        ({"guidance": 3.0}, "unknown option 'guidance'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_are_named_before_anything_runs(
    generator: ImageGenerator, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Part, "run", None)
    with pytest.raises(InputError, match=message):
        generator.generate("one", **options)


def test_a_prompt_that_is_none(generator: ImageGenerator) -> None:
    for wrong in (7, [7], None):
        with pytest.raises(InputError, match=r"prompt must be a text or texts, not (7|None)"):
            generator.generate(wrong, steps=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="there are 65 prompts; give 64 at most"):
        generator.generate(["one"] * 65, steps=1)
    assert generator.generate([], steps=1) == []


def write_bomb(path: Path, side: int) -> None:
    """Write a small file of very many pixels."""
    PIL.Image.new("1", (side, side)).save(path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_text("no picture"), "is not a picture that can be read"),
        (lambda path: path.write_bytes(b""), "is not a picture that can be read"),
        (partial(write_bomb, side=MAX_SIDE + 1), "at most 67108864 are read"),
        (partial(write_bomb, side=2 * MAX_SIDE), "at most 67108864 are read"),  # beyond Pillow's own limit
    ],
    ids=["text", "empty", "bomb", "larger bomb"],
)
def test_files_that_are_no_picture(
    generator: ImageGenerator, tmp_path: Path, write: Any, message: str
) -> None:
    write(tmp_path / "start.png")
    with pytest.raises(DataError, match=message):
        generator.generate("one", steps=1, image=tmp_path / "start.png")


def test_where_one_graph_fails_the_others_are_closed(
    picture_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[OrtProgram] = []
    honest = OrtCpuBackend.open

    def open_or_fail(self: OrtCpuBackend, bundle: Bundle, artifact: Artifact) -> OrtProgram:
        if artifact.graph == "vae_decoder":
            raise BackendError("no room")
        opened.append(honest(self, bundle, artifact))
        return opened[-1]

    monkeypatch.setattr(OrtCpuBackend, "open", open_or_fail)
    with pytest.raises(BackendError, match="no room"):
        ImageGenerator.load(picture_bundle)
    assert len(opened) == 2
    for program in opened:
        with pytest.raises(ClosedError):
            program.find_session()


def test_it_closes(picture_bundle: Path) -> None:
    model = ImageGenerator.load(picture_bundle, threads=1)
    model.warm_up()
    model.close()
    model.close()
    with pytest.raises(Exception, match="was closed"):
        model.generate("one", steps=1)


def test_pictures_that_do_not_fit_are_refused_before_anything_runs(
    picture_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the message says fits does; one step more does not."""
    with ImageGenerator.load(picture_bundle, precision="fp32", threads=1) as model:
        graphs = (part.artifact for part in model.open_parts().values())
        weights = model.bundle.manifest.count_weight_bytes(*graphs)
    limit = weights + 20_000_000
    with ImageGenerator.load(picture_bundle, precision="fp32", threads=1, memory_limit=limit) as model:
        assert len(model.generate("one", steps=1, height=32, width=32)) == 1
        with monkeypatch.context() as patch:
            patch.setattr(Part, "run", lambda *_: pytest.fail("a graph has run"))
            told = r"for 1 picture of 96 x 192 pixels.*What fits: height=(\d+) and width=(\d+)$"
            with pytest.raises(MemoryLimitError, match=told) as caught:
                model.generate("one", steps=1, height=192, width=96)
            found = re.search(told, str(caught.value))
            several = r"for 8 pictures of 64 x 64 pixels, 8 rows .*What fits: (\d) of them \(num_images"
            with pytest.raises(MemoryLimitError, match=several) as crowded:
                model.generate("one", steps=1, height=64, width=64, num_images=8)
            fewer = re.search(several, str(crowded.value))
        assert caught.value.needed > caught.value.limit == limit
        assert found is not None and fewer is not None
        height, width = map(int, found.groups())
        assert (height, width) != (192, 96) and abs(height - 2 * width) <= 8
        model.generate("one", steps=1, height=height, width=width)
        count = int(fewer[1])
        assert len(model.generate("one", steps=1, height=64, width=64, num_images=count)) == count
        with pytest.raises(MemoryLimitError):
            model.generate("one", steps=1, height=64, width=64, num_images=count + 1)


def test_another_picture_counts(picture_bundle: Path) -> None:
    """The autoencoder's other side reads it."""
    with ImageGenerator.load(picture_bundle, threads=1, memory_limit=10**12) as model:
        held: list[int] = []
        for options in ({}, {"image": draw_picture(32, 32)}):
            model.generate(
                "one",
                steps=2,
                height=32,
                width=32,
                on_step=lambda step: held.append(model.parts["unet"].budget.count_held()),
                **options,  # type: ignore[arg-type]
            )
    assert held[-1] > held[0] > 0


def test_the_command_names_its_own_options(picture_bundle: Path, tmp_path: Path) -> None:
    options = ("-o", tmp_path / "x.png", "--steps", 1, "--height", 128, "--width", 128)
    line = error_line("run", picture_bundle, "one", *options, "--max-memory", "25MB", code=1)
    assert "--max-memory is 25.0 MB. What fits: --height=" in line and " and --width=" in line
    assert "memory_limit" not in line and not (tmp_path / "x.png").exists()
