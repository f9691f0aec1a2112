"""The settings of a bundle that makes or compares pictures, as its manifest records them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ManifestError
from .defaults import SpecialTokens
from .json_reader import FILE_NAME, Reader

CHANNELS = 3  # red, green and blue
FILTERS = range(6)  # of Pillow


@dataclass(frozen=True)
class PromptDefaults:
    """How a text encoder reads a text.

    Attributes:
        max_length: tokens of a text, special ones included; a shorter one is padded to as many.
        start: the token before a text.
        end: the token behind it.
        pad: the token that fills up a text.
    """

    max_length: int
    start: int
    end: int
    pad: int

    @property
    def special_tokens(self) -> SpecialTokens:
        """Return the tokens around a text."""
        return SpecialTokens((self.start,), (), (self.end,))


@dataclass(frozen=True)
class ImageDefaults(PromptDefaults):
    """What a model of pictures reads, and what it does unless told otherwise.

    Attributes:
        scheduler: the checkpoint's scheduler_config.json.
        height: of a picture, in pixels; a multiple of `multiple`.
        width: likewise.
        multiple: what heights and widths are multiples of: a picture is so many times as wide as its latents.
        scaling_factor: latents of the autoencoder times this are those of the UNet.
        steps: how often the UNet runs for a picture.
        guidance_scale: how much a prompt counts.
        guidance_features: of an embedded guidance scale; None of a model that reads none.
    """

    scheduler: Mapping[str, Any]
    height: int
    width: int
    multiple: int
    scaling_factor: float
    steps: int
    guidance_scale: float
    guidance_features: int | None = None

    @staticmethod
    def from_json(value: Any) -> ImageDefaults:
        r = Reader(value, "images")
        factor = r.number("scaling_factor", 0.0)
        if factor <= 0 or r.get("multiple", int) < 1 or r.get("steps", int) < 1:
            raise ManifestError(f"{FILE_NAME}: images needs scaling_factor, multiple and steps above 0")
        return ImageDefaults(
            max_length=r.get("max_length", int),
            start=r.get("start", int),
            end=r.get("end", int),
            pad=r.get("pad", int),
            scheduler=r.get("scheduler", dict),
            height=r.get("height", int),
            width=r.get("width", int),
            multiple=r.get("multiple", int),
            scaling_factor=factor,
            steps=r.get("steps", int),
            guidance_scale=r.number("guidance_scale", 1.0),
            guidance_features=r.get("guidance_features", int, None),
        )


@dataclass(frozen=True)
class LikenessDefaults(PromptDefaults):
    """How a model that compares pictures with texts reads both.

    Attributes:
        shortest: to how many pixels a picture's shorter side is resized.
        size: of the square in its middle that is read.
        resample: Pillow's number of the filter.
        mean: of red, green and blue, from 0 to 1; it is subtracted.
        std: of the same; what is left is divided by it.
        scale: what cosines are multiplied by before a softmax.
    """

    shortest: int
    size: int
    resample: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float

    @staticmethod
    def from_json(value: Any) -> LikenessDefaults:
        r = Reader(value, "likeness")
        found = LikenessDefaults(
            max_length=r.get("max_length", int),
            start=r.get("start", int),
            end=r.get("end", int),
            pad=r.get("pad", int),
            shortest=r.get("shortest", int),
            size=r.get("size", int),
            resample=r.get("resample", int),
            mean=r.list_of("mean", float),
            std=r.list_of("std", float),
            scale=r.number("scale", 1.0),
        )
        if not 1 <= found.size <= found.shortest or found.scale <= 0 or min(found.std, default=0) <= 0:
            raise ManifestError(f"{FILE_NAME}: likeness needs size from 1 to shortest, scale and std above 0")
        if not len(found.mean) == len(found.std) == CHANNELS or found.resample not in FILTERS:
            raise ManifestError(
                f"{FILE_NAME}: likeness needs three numbers in mean and std, and a filter of Pillow"
            )
        return found
