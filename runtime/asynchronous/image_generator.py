"""A generator of pictures for programs with an event loop."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from ..images.image_generator import ImageGenerator
from ..images.pictures import Picture
from .model import AsyncModel, run_in_thread, wait_for_result

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ..images.options import ImageOptions
    from ..options import LoadOptions


class AsyncImageGenerator(AsyncModel[ImageGenerator]):
    """An `ImageGenerator` whose pictures are awaited. Make one with `await AsyncImageGenerator.load(...)`."""

    @classmethod
    async def load(cls, bundle: str | Path, **options: Unpack[LoadOptions]) -> Self:
        """Open a bundle; see `ImageGenerator.load`."""
        return cls(await run_in_thread(lambda: ImageGenerator.load(bundle, **options), ImageGenerator.close))

    async def generate(self, prompt: str | Iterable[str], **options: Unpack[ImageOptions]) -> list[Picture]:
        """Make pictures; see `ImageGenerator.generate`. `on_step` is called in the engine's thread."""
        future = await run_in_thread(
            lambda: self.model.submit(prompt, client=self.client, **options), Future.cancel
        )
        return await wait_for_result(future, future.cancel)
