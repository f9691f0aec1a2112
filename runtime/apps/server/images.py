"""/v1/images/generations and /v1/images/edits: pictures, whole or with the steps on their way."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, cast

from starlette.responses import Response

from ...asynchronous.loop_calls import get_loop_calls
from ...images.image_generator import ImageGenerator, Step
from ...images.pictures import Picture, import_pillow
from ...scheduling.steps import Steps
from .answers import ImageEntry, ImageEvent, ImagesAnswer
from .calls import Call, cancel_when_gone, wait_for_all
from .errors import find_api_error
from .image_bodies import ImageEditsRequest, ImagesRequest
from .streaming import DONE, EventStream, wait_for_first, write_event
from .text_sizes import measure_texts

MAX_UNSENT = 4  # events that wait for the client, beyond which pictures on the way are left out
NAMES = {"height": "size", "width": "size", "num_images": "n"}
Kind: TypeAlias = Literal["image_generation", "image_edit"]


async def generate_images(call: Call[ImagesRequest]) -> Response:
    """Make pictures of a text."""
    return await make_images(call, "image_generation", {})


async def edit_images(call: Call[ImageEditsRequest]) -> Response:
    """Make pictures of a text and of another picture."""
    return await make_images(call, "image_edit", {"image": call.body.image, **call.take("strength")})


async def make_images(call: Call[ImagesRequest], kind: Kind, options: dict[str, Any]) -> Response:
    """Return the pictures of a request, or what a stream of them begins with."""
    for name, text in call.take("prompt", "negative_prompt").items():
        measure_texts(call, [text], (name, ""))
    options |= call.take(
        "negative_prompt", "steps", "guidance_scale", "scheduler", "seed", num_images="n"
    ) | read_size(call.body.size)
    job = PictureJob(call, kind, options)
    if not call.body.stream:
        return await job.collect()
    first, events = await wait_for_first(job.stream(), write_failure)
    return EventStream(first, events)


def read_size(size: str | None) -> dict[str, int]:
    """Return height and width of "WIDTHxHEIGHT"; nothing where the model chooses."""
    if size is None or size == "auto":
        return {}
    width, height = map(int, size.split("x"))
    return {"height": height, "width": width}


def write_failure(error: BaseException) -> bytes:
    """Return the event of what went wrong."""
    return write_event(find_api_error(error, NAMES).to_json())


@dataclass(frozen=True)
class PictureJob:
    """The pictures of one call."""

    call: Call[ImagesRequest]
    kind: Kind
    options: dict[str, Any]

    async def collect(self) -> Response:
        """Return the answer that has all pictures."""
        future = await self._submit(None)
        async with cancel_when_gone(self.call.request, future.cancel):
            (pictures,) = await wait_for_all([future])

        def write() -> Steps[ImagesAnswer]:
            entries = []
            for picture in pictures:
                entries.append(ImageEntry(self._encode(picture), picture.seed, picture.dropped))
                yield
            return ImagesAnswer(int(time.time()), entries, self._format, write_size(pictures[0]))

        return await self.call.write(write())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield an event behind each step, some pictures on the way, and those that it led to."""
        events: asyncio.Queue[bytes | None] = asyncio.Queue()
        loop = get_loop_calls()

        def put(event: bytes | None) -> None:  # in the engine's thread
            loop.call(partial(events.put_nowait, event))

        def tell(step: Step) -> None:
            put(self._write_step(step))
            # A slow client gets fewer pictures on the way.
            if events.qsize() <= MAX_UNSENT and (partial_images := self._write_partial(step)):
                put(partial_images)

        future = await self._submit(tell)
        future.add_done_callback(lambda _: put(None))
        async with cancel_when_gone(self.call.request, future.cancel):
            began = False
            while (event := await events.get()) is not None:
                began = True
                yield event
            try:
                (pictures,) = await wait_for_all([future])
                yield await self.call.run_amid_answer(lambda: self._write_end(pictures))
            except Exception as error:
                if not began:
                    raise
                yield write_failure(error)
                return
        yield DONE

    async def _submit(self, on_step: Callable[[Step], object] | None) -> Future[list[Picture]]:
        """Let the pictures wait for their turn; another picture is read in another thread."""
        call = self.call
        import_pillow()  # before a picture is made that could not be written
        model = cast(ImageGenerator, call.served.model)  # the capabilities say so
        return await call.run(
            lambda: model.submit(
                call.body.prompt, client=call.client, timeout=call.timeout, on_step=on_step, **self.options
            )
        )

    @property
    def _format(self) -> str:
        return self.call.body.output_format or "png"

    def _encode(self, picture: Picture) -> str:
        return base64.b64encode(picture.encode(self._format)).decode()

    def _write_step(self, step: Step) -> bytes:
        event = self._make_event("step", step=step.number, steps=step.count, seconds_left=step.seconds_left)
        return write_event(event)

    def _write_partial(self, step: Step) -> bytes:
        """Return the events of the pictures as far as they are, if it is their turn."""
        place = find_partial(step, self.call.body.partial_images or 0)
        if place is None:
            return b""
        return self._write_pictures("partial_image", step.preview(), partial_image_index=place)

    def _write_end(self, pictures: Sequence[Picture]) -> bytes:
        one = pictures[0]
        return self._write_pictures("completed", pictures, seed=one.seed, dropped=one.dropped)

    def _write_pictures(self, word: str, pictures: Sequence[Picture], **members: Any) -> bytes:
        """Return an event for each picture of the request, which all have the same prompt and seed."""
        events = (
            self._make_event(
                word,
                index=index,
                b64_json=self._encode(picture),
                size=write_size(picture),
                output_format=self._format,
                **members,
            )
            for index, picture in enumerate(pictures)
        )
        return b"".join(map(write_event, events))

    def _make_event(self, word: str, **members: Any) -> ImageEvent:
        return ImageEvent(f"{self.kind}.{word}", int(time.time()), **members)  # type: ignore[arg-type]


def find_partial(step: Step, count: int) -> int | None:
    """Return which of `count` pictures on the way, evenly spread, a step has; None if it has none."""
    count = min(count, step.count - 1)  # the last step leads to the picture itself
    steps: Sequence[int] = [(index + 1) * step.count // (count + 1) for index in range(count)]
    return steps.index(step.number) if step.number in steps else None


def write_size(picture: Picture) -> str:
    """Return a picture's width and height as OpenAI writes them."""
    height, width, _ = picture.pixels.shape
    return f"{width}x{height}"
