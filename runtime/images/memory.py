"""The memory that pictures take while they are made, held while a call runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from ..activations import PictureBatch, count_picture_bytes
from ..bundle.image_defaults import ImageDefaults
from ..memory_budget import MemoryBudget, find_largest


class PictureBudget:
    """Counts what pictures take while they are made, in the memory that a model may use."""

    def __init__(self, budget: MemoryBudget, config: Mapping[str, Any], defaults: ImageDefaults) -> None:
        self.memory = budget
        self._config = config
        self._multiple = defaults.multiple

    def reserve(self, batch: PictureBatch) -> AbstractContextManager[None]:
        """Hold what a batch needs while it runs; refuse it where it does not fit even alone."""
        available = self.memory.count_available()
        if available is None:
            return nullcontext()
        needed = count_picture_bytes(self._config, batch, self._multiple)
        height, width = (length * self._multiple for length in (batch.height, batch.width))
        pictures = "1 picture" if batch.count == 1 else f"{batch.count} pictures"
        what = f"{pictures} of {width} x {height} pixels, {batch.rows} rows at a time"
        return self.memory.reserve(needed, what, self._suggest(batch, available))

    def _suggest(self, batch: PictureBatch, available: int) -> str:
        """Return in words fewer pictures, or a size of the same shape, that fit."""

        def fits(one: PictureBatch) -> bool:
            return count_picture_bytes(self._config, one, self._multiple) <= available

        shorter = min(batch.height, batch.width)

        def scale(length: int) -> PictureBatch:
            height, width = (max(1, side * length // shorter) for side in (batch.height, batch.width))
            return replace(batch, height=height, width=width)

        pictures = find_largest(lambda count: fits(replace(batch, count=count)), batch.count - 1)
        smaller = scale(find_largest(lambda length: fits(scale(length)), shorter - 1))
        found = [f"{pictures} of them (num_images, or fewer texts)"] if pictures else []
        if fits(smaller):
            height, width = smaller.height * self._multiple, smaller.width * self._multiple
            found.append(f"height={height} and width={width}")
        return f"What fits: {' or '.join(found)}" if found else "No smaller size fits"
