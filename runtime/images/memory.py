"""The memory that pictures take while they are made, added up before anything runs.

A graph's results that live at one time: scores of attention, which grow with the square of a picture's
points, and feature maps of each level. All of them count, as an engine keeps what each part needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ..bundle.image_defaults import ImageDefaults
from ..decoding.activations import count_batch_bytes
from ..memory_budget import MemoryBudget, find_largest

ITEM = 4  # bytes: ONNX Runtime computes in fp32 on a CPU, and what is kept in fp16 takes less elsewhere
# Results of a transformer block, in channels: its feed-forward part's product (8), the two halves of it (8),
# activation (4), and product of both (4); and its input, norm, sum, query, key and value before and after
# they are split into heads, context, and what is projected.
BLOCK_RESULTS = 24 + 12
# Of a residual block, of its input that has another level's channels too: joined, normalized, scaled,
# shifted, activated, reordered for the convolution; its result, the sum, and a copy for the next one.
RESIDUAL_RESULTS = 9
# Of a residual block of the autoencoder: its input, normalized, scaled, shifted and activated.
PICTURE_RESULTS = 5


@dataclass(frozen=True)
class Batch:
    """What is made by one call.

    Attributes:
        count: of pictures.
        guided: whether the UNet has a row for each negative prompt too.
        most: rows that a graph runs at one time.
        height: of latents.
        width: likewise.
        tokens: of each prompt.
        reads_picture: whether another picture is read, by the encoder's side.
    """

    count: int
    guided: bool
    most: int
    height: int
    width: int
    tokens: int
    reads_picture: bool

    @property
    def pictures(self) -> int:
        """Pictures that the autoencoder makes at one time."""
        return min(self.count, self.most)

    @property
    def rows(self) -> int:
        """Rows that text encoder and UNet run at one time."""
        return min(self.count * (2 if self.guided else 1), self.most)


class PictureBudget:
    """Counts what pictures take while they are made, in the memory that a model may use."""

    def __init__(self, budget: MemoryBudget, config: Mapping[str, Any], defaults: ImageDefaults) -> None:
        self.memory = budget
        self._config = config
        self._multiple = defaults.multiple

    def reserve(self, batch: Batch) -> AbstractContextManager[None]:
        """Hold what a batch needs while it runs; refuse it where it does not fit even alone."""
        available = self.memory.count_available()
        if available is None:
            return nullcontext()
        needed = count_picture_bytes(self._config, batch, self._multiple)
        height, width = (length * self._multiple for length in (batch.height, batch.width))
        pictures = "1 picture" if batch.count == 1 else f"{batch.count} pictures"
        what = f"{pictures} of {width} x {height} pixels, {batch.rows} rows at a time"
        return self.memory.reserve(needed, what, self._suggest(batch, available))

    def _suggest(self, batch: Batch, available: int) -> str:
        """Return in words fewer pictures, or a size of the same shape, that fit."""

        def fits(one: Batch) -> bool:
            return count_picture_bytes(self._config, one, self._multiple) <= available

        shorter = min(batch.height, batch.width)

        def scale(length: int) -> Batch:
            height, width = (max(1, side * length // shorter) for side in (batch.height, batch.width))
            return replace(batch, height=height, width=width)

        pictures = find_largest(lambda count: fits(replace(batch, count=count)), batch.count - 1)
        smaller = scale(find_largest(lambda length: fits(scale(length)), shorter - 1))
        found = [f"{pictures} of them (num_images, or fewer texts)"] if pictures else []
        if fits(smaller):
            height, width = smaller.height * self._multiple, smaller.width * self._multiple
            found.append(f"height={height} and width={width}")
        return f"What fits: {' or '.join(found)}" if found else "No smaller size fits"


def count_picture_bytes(config: Mapping[str, Any], batch: Batch, multiple: int) -> int:
    """Return what all graphs need for a batch, each of which keeps its memory until the model is closed.

    Args:
        config: the bundle's, with the sizes of "text", "unet" and "vae".
        batch: what runs at one time.
        multiple: how many times as wide as its latents a picture is.
    """
    text = count_batch_bytes(config["text"], batch.rows * batch.tokens, batch.tokens)
    made = text + count_unet_bytes(config["unet"], batch) + count_vae_bytes(config["vae"], batch, multiple)
    if not batch.reads_picture:
        return made
    return made + count_vae_bytes(config["vae"], replace(batch, count=1), multiple)


def count_unet_bytes(config: Mapping[str, Any], batch: Batch) -> int:
    """Return what the UNet needs: its largest scores, and each level's results, kept ones too.

    What is kept on the way down is joined on the way up. A softmax takes the place of its scores.
    """
    channels = config["block_out_channels"]
    scores = 0
    features = 0
    for level, own in enumerate(channels):
        points = halve(batch.height, level) * halve(batch.width, level)
        below = channels[min(level + 1, len(channels) - 1)]
        kept = (config["layers_per_block"] + 1) * own
        features += points * (RESIDUAL_RESULTS * (own + below) + kept)
        if config["has_attention"][level]:
            heads = config["heads"][level]
            features += points * (BLOCK_RESULTS * own + heads * batch.tokens)
            scores = max(scores, heads * points**2)
    return int(ITEM * batch.rows * (scores + features))


def count_vae_bytes(config: Mapping[str, Any], batch: Batch, multiple: int) -> int:
    """Return what a side of the autoencoder needs: scores of one head over latents, and maps of full size.

    Those have the channels of the second level, as the decoder widens them before it has fewer.
    """
    points = batch.height * batch.width
    channels = max(config["block_out_channels"][:2])
    maps = PICTURE_RESULTS * channels * points * multiple**2
    return int(ITEM * batch.pictures * (points**2 + maps))


def halve(length: int, times: int) -> int:
    """Return a length after some convolutions that take every second point."""
    return -(-length // (1 << times))
