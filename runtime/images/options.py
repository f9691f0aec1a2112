"""The options of a call that makes pictures, with diffusers' meanings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from .image_generator import Step
    from .pictures import GivenPicture

MAX_PICTURES = 64  # of one call


class ImageOptions(TypedDict, total=False):
    """The options of `ImageGenerator.generate`.

    Attributes:
        negative_prompt: what the pictures shall not show: one text for all prompts, or one for each.
        steps: how often the UNet runs for each picture; more take longer and give finer pictures. By default
            50, of a latent consistency model 4.
        guidance_scale: how much the prompt counts: 1 and less leaves out the negative prompt and takes half
            the time. By default 7.5, of a latent consistency model 8.5.
        height: of the pictures in pixels, a multiple of 8; by default the size that the model was made for,
            or that of `image`.
        width: likewise.
        seed: from 0 to 2**64 - 1; by default another one each time, which the pictures tell.
        image: a picture to begin with: a path, a file's bytes, (H, W, 3) uint8, or an image of Pillow.
        strength: how much of `image` is made anew, above 0 up to 1; by default 0.8. So large a part of the
            steps is made; a latent consistency model makes all of them, closer to each other.
        num_images: of each prompt, 1 by default. All are made together.
        scheduler: "ddim", "pndm", "euler", "euler_ancestral", "dpm++2m", "dpm++2m_karras" or "lcm"; by
            default the checkpoint's own.
        on_step: called behind each step with a `Step`. An error that it raises ends the call.
    """

    negative_prompt: str | Sequence[str] | None
    steps: int | None
    guidance_scale: float | None
    height: int | None
    width: int | None
    seed: int | None
    image: GivenPicture | None
    strength: float
    num_images: int
    scheduler: str | None
    on_step: Callable[[Step], object] | None
