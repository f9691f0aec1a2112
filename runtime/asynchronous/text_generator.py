"""A text generator for programs with an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..decoding.chunk import Chunk
from ..generate.generation import Generation
from ..generate.pending import PendingGeneration
from ..generate.row_reader import Prompt
from ..generate.text_generator import TextGenerator
from ..text.chat import Message
from .loop_calls import get_loop_calls
from .model import AsyncModel, run_in_thread, wait_for_result

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ..options import GenerationOptions, LoadOptions

Submit = Callable[[], PendingGeneration]


class AsyncTextStream(AsyncIterator[Chunk]):
    """The chunks of one answer, each as soon as it is there.

    May be left at any point: a stream that is closed, forgotten or whose task is cancelled ends its request.
    A call of `cancel` ends the answer in order: what was held back comes as a last chunk.

    Args:
        submit: submits the request, in another thread, when the first chunk is asked for.
    """

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._pending: PendingGeneration | None = None
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()  # None is behind the last one
        self._cancelled = False
        self._ended = False

    async def __anext__(self) -> Chunk:
        if self._ended:
            raise StopAsyncIteration
        try:
            if self._pending is None:
                self._pending = await self._start()
            chunk = await self._chunks.get()
        except BaseException:
            await self.aclose()
            raise
        if chunk is not None:
            return chunk
        self._ended = True
        self._pending.future.result()  # raises what ended the request
        raise StopAsyncIteration

    async def _start(self) -> PendingGeneration:
        pending = await run_in_thread(self._submit, PendingGeneration.cancel)
        calls = get_loop_calls()
        put = self._chunks.put_nowait  # the request does not keep this stream alive
        pending.subscribe(lambda chunk: calls.call(partial(put, chunk)))
        pending.future.add_done_callback(lambda _: calls.call(partial(put, None)))
        if self._cancelled:
            pending.cancel()
        return pending

    def cancel(self) -> None:
        """End the answer before its next step; the last chunk says "cancelled"."""
        self._cancelled = True
        if self._pending is not None:
            self._pending.cancel()

    async def aclose(self) -> None:
        """End the stream and its request without a last chunk. Closing twice is fine."""
        self._ended = True
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class AsyncTextGenerator(AsyncModel[TextGenerator]):
    """A `TextGenerator` whose answers are awaited. Make one with `await AsyncTextGenerator.load(...)`.

    Its methods are those of `TextGenerator`, for one prompt each: requests of many tasks run together. They
    take the options of `TextGenerator.submit`.

    Example:
        >>> async with await AsyncTextGenerator.load("bundles/gpt2") as model:
        ...     first, second = await asyncio.gather(model.generate("In the"), model.generate("And it"))
        ...     async for chunk in model.stream("And it came to pass", max_new_tokens=60):
        ...         print(chunk, end="", flush=True)
    """

    @classmethod
    async def load(cls, bundle: str | Path, **options: Unpack[LoadOptions]) -> Self:
        """Open a bundle; see `TextGenerator.load`."""
        return cls(await run_in_thread(lambda: TextGenerator.load(bundle, **options), TextGenerator.close))

    async def generate(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Generation:
        """Continue one prompt; see `TextGenerator.generate`."""
        return await self._answer(lambda: self.model.submit(prompt, client=self.client, **options))

    def stream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> AsyncTextStream:
        """Continue one prompt, a chunk at each step; see `TextGenerator.stream`.

        What is wrong with the prompt or an option is raised when the first chunk is asked for.
        """
        return AsyncTextStream(lambda: self.model.submit(prompt, client=self.client, **options))

    async def chat(self, messages: Sequence[Message], **options: Unpack[GenerationOptions]) -> Generation:
        """Answer a conversation; see `TextGenerator.chat`."""
        return await self._answer(lambda: self.model.submit_chat(messages, client=self.client, **options))

    def stream_chat(
        self, messages: Sequence[Message], **options: Unpack[GenerationOptions]
    ) -> AsyncTextStream:
        """Answer a conversation as `chat` does, a chunk at each step as `stream` does."""
        return AsyncTextStream(lambda: self.model.submit_chat(messages, client=self.client, **options))

    async def _answer(self, submit: Submit) -> Generation:
        pending = await run_in_thread(submit, PendingGeneration.cancel)
        return await wait_for_result(pending.future, pending.cancel)
