"""Coloured digits with captions, for sd-demo: scikit-learn's 1,797 digits, and what reads them again.

N pictures; each is (3, 32, 32) from -1 to 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits
from sklearn.svm import SVC

Array = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

SIZE = 32  # of a picture
SMALL = 8  # of scikit-learn's
TRAINED = 1000  # digits that sd-demo is trained with; the rest teaches the reader
SEED = 1898  # the year of the first patent for reading digits by machine
COLOURS = {
    "red": (1.0, 0.15, 0.15),
    "green": (0.15, 0.85, 0.2),
    "blue": (0.2, 0.35, 1.0),
    "yellow": (1.0, 0.9, 0.15),
    "purple": (0.7, 0.2, 0.9),
    "white": (1.0, 1.0, 1.0),
}
NAMES = tuple(COLOURS)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FORMS = ("a {colour} {number}", "{colour} {number}", "the number {number} in {colour}")
BRIGHT = 0.4  # of a point that is a part of the digit


@dataclass(frozen=True)
class Digits:
    """Digits (N, 8, 8) from 0 to 1, and what they are (N,)."""

    images: Array
    labels: Integers

    def draw(self, numbers: Integers, colours: Integers) -> Array:
        """Return pictures (M, 3, 32, 32) of some digits in some colours, by their numbers."""
        import torch
        from torch.nn.functional import interpolate

        small = torch.from_numpy(self.images[numbers])[:, None]
        large = interpolate(small, size=SIZE, mode="bicubic", align_corners=False).clamp(0, 1).numpy()
        tints = np.array(list(COLOURS.values()), np.float32)[colours][:, :, None, None]
        pictures: Array = large * tints * 2 - 1
        return pictures


def load() -> tuple[Digits, Digits]:
    """Return the digits that sd-demo is trained with, and the others."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, SMALL, SMALL) / 16).astype(np.float32)
    order = np.random.default_rng(SEED).permutation(len(images))
    parts = order[:TRAINED], order[TRAINED:]
    trained, others = (Digits(images[part], labels[part].astype(np.int64)) for part in parts)
    return trained, others


def caption(number: int, colour: int, random: np.random.Generator) -> str:
    """Return one of the texts that a digit of a colour has."""
    word = NUMBERS[number] if random.random() < 0.6 else str(number)
    return FORMS[random.integers(len(FORMS))].format(colour=NAMES[colour], number=word)


@dataclass(frozen=True)
class Reader:
    """Reads digit and colour of a picture; it has seen none of the digits that sd-demo was trained with."""

    classifier: Any

    @classmethod
    def train(cls) -> Reader:
        """Return a reader that has learned from pictures of the other digits, in all colours."""
        _, others = load()
        numbers = np.tile(np.arange(len(others.images)), len(NAMES))
        colours = np.repeat(np.arange(len(NAMES)), len(others.images))
        shown = shrink(others.draw(numbers, colours))
        return cls(SVC(C=10).fit(shown, others.labels[numbers]))

    def read(self, pictures: Array) -> tuple[Integers, Integers]:
        """Return the digits (N,) and the colours' numbers (N,) of pictures (N, 3, 32, 32)."""
        digits = self.classifier.predict(shrink(pictures)).astype(np.int64)
        values = (pictures.clip(-1, 1) + 1) / 2
        is_shown = values.max(axis=1, keepdims=True) > BRIGHT
        tints = normalize((values * is_shown).sum(axis=(2, 3)))  # (N, 3)
        known = normalize(np.array(list(COLOURS.values()), np.float32))
        colours: Integers = np.square(tints[:, None] - known[None]).sum(-1).argmin(-1).astype(np.int64)
        return digits, colours


def shrink(pictures: Array) -> Array:
    """Return the brightness (N, 64) of pictures (N, 3, 32, 32), as large as scikit-learn's digits."""
    brightness = ((pictures.clip(-1, 1) + 1) / 2).max(axis=1)
    side = SIZE // SMALL
    small: Array = (
        brightness.reshape(-1, SMALL, side, SMALL, side).mean(axis=(2, 4)).reshape(-1, SMALL * SMALL)
    )
    return small


def normalize(colours: Array) -> Array:
    """Return colours (..., 3) whose largest part is 1."""
    scaled: Array = colours / np.maximum(colours.max(axis=-1, keepdims=True), 1e-6)
    return scaled
