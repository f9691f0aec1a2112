"""`planforge run` and other commands with a bundle that makes pictures, as a user types them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest

from planforge.exporter.commands.inspection import sum_sizes
from planforge.exporter.commands.summary import summarize_bundle
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.images.image_generator import ImageGenerator
from planforge.runtime.images.image_text_encoder import ImageTextEncoder

from ..helpers.cli import error_line, planforge

FEW = ("--steps", "2", "--seed", "3")


def read(path: Path) -> npt.NDArray[np.uint8]:
    return np.asarray(PIL.Image.open(path))


def test_a_picture_of_a_text_and_one_of_that(picture_bundle: Path, tmp_path: Path) -> None:
    first = tmp_path / "one.png"
    second = tmp_path / "two.png"
    done = planforge("run", picture_bundle, "a red one", "-o", first, *FEW)
    assert done.stdout == f"{first}\n"
    assert "making pictures" in done.stderr and "--seed" not in done.stderr
    options = ("--image", first, "--strength", "0.5", "--scheduler", "euler", "--guidance-scale", "2")
    assert planforge("run", picture_bundle, "a red one", "-o", second, *FEW, *options).returncode == 0
    with ImageGenerator.load(picture_bundle) as model:
        (wanted,) = model.generate("a red one", steps=2, seed=3)
        assert np.array_equal(read(first), wanted.pixels)
        (wanted,) = model.generate(
            "a red one", steps=2, seed=3, image=first, strength=0.5, scheduler="euler", guidance_scale=2.0
        )
        assert np.array_equal(read(second), wanted.pixels)


def test_the_seed_that_was_taken_makes_the_picture_again(picture_bundle: Path, tmp_path: Path) -> None:
    first = tmp_path / "one.png"
    second = tmp_path / "two.png"
    done = planforge("run", picture_bundle, "one", "-o", first, "--steps", "1")
    (seed,) = re.findall(r"^--seed (\d+) makes this picture again$", done.stderr, re.MULTILINE)
    planforge("run", picture_bundle, "one", "-o", second, "--steps", "1", "--seed", seed)
    assert first.read_bytes() == second.read_bytes()


def test_the_summary_tells_how_near_each_graph_is_and_counts_weights_once(picture_bundle: Path) -> None:
    found = summarize_bundle(picture_bundle)
    verdicts = {name: verdict for name, _, verdict in found.sections[0][2]}
    assert "noise within" in verdicts["unet.ort.fp32"] and "pictures from noise" in verdicts["unet.ort.fp32"]
    assert "values within" in verdicts["vae_decoder.ort.fp32"]
    sizes = {name: size for name, size, _ in found.sections[0][2]}
    manifest = Bundle.open(picture_bundle).manifest
    unet = manifest.artifact("unet.ort.fp32")
    shared = {name for artifact in manifest.artifacts for name in artifact.data}
    assert sizes["unet.ort.fp32"] == sum_sizes(manifest, unet.file)
    assert sizes["weights of several"] == sum_sizes(manifest, *shared)


def test_several_pictures(picture_bundle: Path, tmp_path: Path) -> None:
    done = planforge(
        "run", picture_bundle, "one", "the", "-o", tmp_path / "x.png", "--num-images", "2", "--json", *FEW
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [Path(line["file"]).name for line in found] == [f"x-{n}.png" for n in (1, 2, 3, 4)]
    assert [line["prompt"] for line in found] == ["one", "one", "the", "the"]
    assert all(read(Path(line["file"])).shape == (32, 32, 3) for line in found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "one"), "add -o FILE.png"),
        (("run", "one", "-o", "nowhere/x.png"), "the folder nowhere does not exist"),
        (("run", "one", "-o", "x.foo"), "ends with .png, .jpg or .webp"),
        (("run", "one", "-o", "x.png", "--height", "30"), "height=30 is not a multiple of 4"),
        (("run", "one", "-o", "x.png", "--temperature", "1"), "--temperature cannot be used with"),
        (("run", "one", "-o", "x.png", "--task", "embed"), "this bundle makes pictures"),
        (("package", "-o", "x", "--for", "optimum"), "optimum-onnx takes"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(picture_bundle: Path, arguments: tuple[str, ...], words: str) -> None:
    command, *rest = arguments
    assert words in error_line(command, picture_bundle, *rest)


@pytest.mark.parametrize(
    "arguments",
    [
        ("prove", "--data", "TABLE"),
        ("explain", "one"),
        ("batch", "--task", "embed", "--input", "TABLE", "-o", "out.tsv"),
        ("fit-head", "TABLE", "-o", "new"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_is_for_texts_alone_names_commands_that_work(
    picture_bundle: Path, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.tsv"
    table.write_text("text\tlabel\none\ta\ntwo\tb\n", encoding="utf-8")
    command, *rest = (str(table) if word == "TABLE" else word for word in arguments)
    line = error_line(command, picture_bundle, *rest)
    assert f"is for models of text, and {picture_bundle} makes pictures" in line
    run, selftest = (shlex.split(words)[1:] for words in re.findall("`(.*?)`", line))
    assert run[:2] == ["run", str(picture_bundle)] and selftest == ["selftest", str(picture_bundle)]
    monkeypatch.chdir(tmp_path)
    if command == "prove":  # the commands are the same in each line; selftest runs below
        assert planforge(*run, *FEW).returncode == 0
        assert read(tmp_path / "picture.png").shape == (32, 32, 3)


def test_bench_counts_steps_and_pictures(picture_bundle: Path, tmp_path: Path) -> None:
    settings = ("--steps", 2, "--height", 24, "--width", 40, "--batch", 2, "--precision", "fp32")
    done = planforge(
        "bench", picture_bundle, *settings, "-o", tmp_path / "x.json", "--plot", tmp_path / "x.png"
    )
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stderr  # of its own prompt
    assert "2 steps, batch 2, on ort-cpu" in done.stdout
    assert "s/step" in done.stdout and "s/picture" in done.stdout and "tokens" not in done.stdout
    (case,) = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["cases"]
    assert (case["steps"], case["artifact"]) == (2, "unet.ort.fp32")
    assert case["step_ms"]["p50"] < case["latency_ms"]["p50"]
    assert case["steps_per_s"] == pytest.approx(2 * case["pictures_per_s"], rel=0.01)
    assert not [name for name in case if "token" in name or "text" in name]
    assert read(tmp_path / "x.png").ndim == 3
    for option, words in (
        (("--new-tokens", 3), "this bundle makes pictures; leave prompt_tokens and new_tokens out"),
        (("--height", 25), "height=25 is not a multiple of 4"),
        (("--batch", 65), "batch=65 must be from 1 to 64"),
    ):
        assert words in error_line("bench", picture_bundle, "--precision", "fp32", *option)


def test_diff_sends_nobody_to_prove(picture_bundle: Path) -> None:
    done = planforge("diff", picture_bundle, picture_bundle)
    assert done.returncode == 2 and "planforge selftest BUNDLE compares" in done.stdout
    assert "prove BUNDLE" not in done.stdout


def test_selftest_and_inspect(picture_bundle: Path) -> None:
    done = planforge("selftest", picture_bundle)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from noise of 8 x 8" in done.stdout
    shown = planforge("inspect", picture_bundle)
    assert "image-generation" in shown.stdout


def test_a_picture_is_compared_with_texts(clip_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    PIL.Image.fromarray(np.arange(40 * 50 * 3, dtype=np.uint8).reshape(40, 50, 3)).save(path)
    texts = ["a red one", "a blue two", "the number"]
    with ImageTextEncoder.load(clip_bundle) as model:
        wanted = model.classify(path, texts, template="{}")[0]
    lines = planforge("run", clip_bundle, *texts, "--image", path).stdout.splitlines()
    assert lines == [f"{share:.4f}  {text}" for text, share in wanted.items()]
    told = [
        json.loads(line)
        for line in planforge("run", clip_bundle, *texts, "--image", path, "--json").stdout.splitlines()
    ]
    assert [line["text"] for line in told] == list(wanted)
    assert sum(line["probability"] for line in told) == pytest.approx(1)
    assert "add --image FILE" in error_line("run", clip_bundle, *texts)
    assert "give two or more texts" in error_line("run", clip_bundle, "one", "--image", path)
    for command in ("bench", "serve"):
        assert "compares a picture with texts" in error_line(command, clip_bundle)
    assert planforge("selftest", clip_bundle).returncode == 0
