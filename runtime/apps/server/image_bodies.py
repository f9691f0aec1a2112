"""The bodies of requests for pictures, as types; see `bodies`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .bodies import UNSUPPORTED, Body, Text, Unused, limits, refusal, says

MAX_IMAGES = 10  # of a request, as OpenAI has it
NO_URL = refusal("this server keeps no pictures that a URL could lead to")
Size = Annotated[
    str, Meta(pattern="^(auto|[0-9]{1,5}x[0-9]{1,5})$"), says("Width x height in pixels, or auto.")
]
Format = Literal["png", "jpeg", "webp"]
Strength = Annotated[float, Meta(gt=0, le=1), says("How much of the picture is made anew.")]


class ImagesRequest(Body, kw_only=True):
    """The body of /v1/images/generations."""

    prompt: Text
    negative_prompt: Annotated[Text, says("What the pictures shall not show.")] | None = None
    n: Annotated[int, limits(1, MAX_IMAGES, "How many pictures.")] | None = None
    size: Size | None = None
    steps: Annotated[int, limits(1, 1000, "How often the UNet runs.")] | None = None
    guidance_scale: Annotated[float, limits(0, 999, "How much the prompt counts.")] | None = None
    scheduler: Annotated[str, says("How noise is taken away, such as ddim.")] | None = None
    seed: Annotated[int, limits(0, 2**63 - 1, "Makes the same pictures again.")] | None = None
    response_format: Annotated[Literal["b64_json"], NO_URL] | None = None
    output_format: Format | None = None
    stream: Annotated[bool, says("Send an event behind each step.")] | None = None
    partial_images: Annotated[int, limits(0, 8, "Pictures of the way there, in a stream.")] | None = None
    background: Annotated[Literal["auto", "opaque"], refusal(UNSUPPORTED)] | None = None
    quality: Unused[Literal["auto", "standard", "hd", "low", "medium", "high"]] | None = None
    style: Unused[Literal["vivid", "natural"]] | None = None
    moderation: Unused[Literal["auto", "low"]] | None = None


class ImageEditsRequest(ImagesRequest, kw_only=True):
    """The body of /v1/images/edits, in JSON or as a form with a file."""

    image: Annotated[bytes, refusal("give a picture's file: in base64 in JSON, as a file in a form")]
    strength: Strength | None = None
