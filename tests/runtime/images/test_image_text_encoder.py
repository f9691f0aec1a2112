"""`ImageTextEncoder` against transformers' CLIP: vectors, likeness, and how pictures and texts are read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest
import torch
import transformers

from planforge.runtime.errors import DataError, InputError
from planforge.runtime.images.image_text_encoder import ImageTextEncoder, read_pixels

from ...helpers.diffusion import make_image_processor

TEXTS = ["a red one", "the number two in blue", "", "one " * 40]
SIZES = [(41, 67), (67, 41), (34, 34), (30, 200), (500, 333), (7, 9)]  # height, width
VECTOR = 1e-5
LOGIT = 1e-3


def make_picture(height: int, width: int) -> npt.NDArray[np.uint8]:
    """Return noise on a slope, whose every row and column differs."""
    random = np.random.default_rng(height * 1000 + width)
    slope = np.add.outer(np.arange(height) * 3, np.arange(width))[:, :, None] * np.array([1, 2, 5])
    pixels: npt.NDArray[np.uint8] = ((slope + random.integers(0, 40, slope.shape)) % 256).astype(np.uint8)
    return pixels


@pytest.fixture(scope="module")
def pictures() -> list[npt.NDArray[np.uint8]]:
    return [make_picture(*size) for size in SIZES]


@pytest.fixture(scope="module")
def model(clip_bundle: Path) -> Iterator[ImageTextEncoder]:
    with ImageTextEncoder.load(clip_bundle, precision="fp32") as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(clip_bundle: Path) -> Any:
    return transformers.CLIPModel.from_pretrained(clip_bundle.parent / "checkpoint").eval()


@pytest.fixture(scope="module")
def tokens(clip_bundle: Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(clip_bundle.parent / "checkpoint")
    return tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")


@pytest.mark.parametrize("size", SIZES)
def test_pictures_are_read_as_transformers_reads_them(size: tuple[int, int], model: ImageTextEncoder) -> None:
    picture = make_picture(*size)
    expected = make_image_processor()(picture, return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(read_pixels(picture, model.defaults), expected, rtol=0, atol=1e-6)


def test_vectors_and_likeness(
    model: ImageTextEncoder, reference: Any, tokens: Any, pictures: list[npt.NDArray[np.uint8]]
) -> None:
    pixels = make_image_processor()(pictures, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        wanted = reference(**tokens, pixel_values=pixels)
    np.testing.assert_allclose(model.embed_texts(TEXTS), wanted.text_embeds, rtol=0, atol=VECTOR)
    np.testing.assert_allclose(model.embed_images(pictures), wanted.image_embeds, rtol=0, atol=VECTOR)
    logits = model.compare(pictures, TEXTS)
    assert logits.shape == (len(SIZES), len(TEXTS))
    np.testing.assert_allclose(logits, wanted.logits_per_image, rtol=0, atol=LOGIT)
    assert np.ptp(logits, axis=1).min() > LOGIT  # texts and pictures that are told apart


def test_one_is_a_row_of_several(model: ImageTextEncoder, pictures: list[npt.NDArray[np.uint8]]) -> None:
    many = model.embed_texts(["a red one", *TEXTS] * 10)  # more than a batch
    assert many.shape == (50, 24)
    np.testing.assert_allclose(many[5:10], many[:5], rtol=0, atol=VECTOR)
    np.testing.assert_allclose(model.embed_texts("a red one"), many[0], rtol=0, atol=VECTOR)
    one = model.embed_images(pictures[0])
    np.testing.assert_allclose(model.embed_images(iter(pictures))[0], one, rtol=0, atol=VECTOR)
    np.testing.assert_allclose(np.linalg.norm(many, axis=1), 1, rtol=0, atol=1e-6)
    assert model.embed_texts([]).shape == model.embed_images([]).shape == (0, 24)


def test_a_picture_may_be_a_file_bytes_or_pillows(
    model: ImageTextEncoder, pictures: list[npt.NDArray[np.uint8]], tmp_path: Path
) -> None:
    path = tmp_path / "x.png"
    image = PIL.Image.fromarray(pictures[0])
    image.save(path)
    given: list[Any] = [pictures[0], image, path, str(path), path.read_bytes()]
    vectors = model.embed_images(given)
    assert all(np.array_equal(model.embed_images(one), model.embed_images(given[0])) for one in given)
    np.testing.assert_allclose(vectors, vectors[[0] * 5], rtol=0, atol=VECTOR)


def test_labels_share_a_probability(
    model: ImageTextEncoder, reference: Any, clip_bundle: Path, pictures: list[npt.NDArray[np.uint8]]
) -> None:
    labels = ["red", "blue", "one"]
    found = model.classify(pictures, labels, template="the {} number")
    tokenizer = transformers.AutoTokenizer.from_pretrained(clip_bundle.parent / "checkpoint")
    given = tokenizer([f"the {label} number" for label in labels], padding=True, return_tensors="pt")
    pixels = make_image_processor()(pictures, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        wanted = reference(**given, pixel_values=pixels).logits_per_image.softmax(-1).numpy()
    for row, expected in zip(found, wanted, strict=True):
        assert [*row.values()] == sorted(row.values(), reverse=True)
        np.testing.assert_allclose([row[label] for label in labels], expected, rtol=0, atol=LOGIT)


def test_what_is_cut_is_said(model: ImageTextEncoder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "planforge"):
        model.embed_texts("one " * 40)
    assert "tokens more than the 16 that the model reads" in caplog.text


def test_wrong_values_are_refused(model: ImageTextEncoder, tmp_path: Path) -> None:
    bad = tmp_path / "x.png"
    bad.write_bytes(b"no picture")
    wrong: Any = model
    with pytest.raises(DataError, match="is not a picture that can be read"):
        model.embed_images(bad)
    with pytest.raises(InputError, match="a text must be a str, not int"):
        wrong.embed_texts([5])
    with pytest.raises(InputError, match="must be \\(H, W, 3\\) of uint8"):
        model.embed_images(np.zeros((3, 4), np.uint8))
    picture = make_picture(40, 40)
    for labels in (["red"], "red", ["red", "red"]):
        with pytest.raises(InputError, match="must be two or more different texts"):
            model.classify(picture, labels)
    with pytest.raises(InputError, match=r"needs a \{\} where the label goes"):
        model.classify(picture, ["red", "blue"], template="a photo")


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_other_precisions_rank_the_same(
    clip_bundle: Path, model: ImageTextEncoder, pictures: list[npt.NDArray[np.uint8]], precision: str
) -> None:
    exact = model.compare(pictures, TEXTS)
    with ImageTextEncoder.load(clip_bundle, precision=precision) as other:
        found = other.compare(pictures, TEXTS)
    spread = np.std(exact)
    assert 0 < np.abs(found - exact).max() < 0.1 * spread
