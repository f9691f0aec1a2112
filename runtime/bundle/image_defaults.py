"""The settings of a bundle that makes pictures, as its manifest records them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ManifestError
from .defaults import SpecialTokens
from .json_reader import FILE_NAME, Reader


@dataclass(frozen=True)
class ImageDefaults:
    """What a model of pictures reads, and what it does unless told otherwise.

    Attributes:
        max_length: tokens of a prompt, special ones included; a shorter one is padded to as many.
        start: the token before a prompt.
        end: the token behind it.
        pad: the token that fills up a prompt.
        scheduler: the checkpoint's scheduler_config.json.
        height: of a picture, in pixels; a multiple of `multiple`.
        width: likewise.
        multiple: what heights and widths are multiples of: a picture is so many times as wide as its latents.
        scaling_factor: latents of the autoencoder times this are those of the UNet.
        steps: how often the UNet runs for a picture.
        guidance_scale: how much a prompt counts.
        guidance_features: of an embedded guidance scale; None of a model that reads none.
    """

    max_length: int
    start: int
    end: int
    pad: int
    scheduler: Mapping[str, Any]
    height: int
    width: int
    multiple: int
    scaling_factor: float
    steps: int
    guidance_scale: float
    guidance_features: int | None = None

    @property
    def special_tokens(self) -> SpecialTokens:
        """Return the tokens around a prompt."""
        return SpecialTokens((self.start,), (), (self.end,))

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
