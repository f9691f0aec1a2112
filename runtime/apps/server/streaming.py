"""Server-sent events: an answer's chunks as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...asynchronous.loop_calls import get_loop_calls
from ...decoding.chunk import Chunk
from ...generate.pending import PendingGeneration
from .answers import ChatEvent, CompletionEvent, Record
from .json_text import encode_json

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
COMMENT_SECONDS = 15.0


Item: TypeAlias = "tuple[int, Chunk | BaseException | None]"


class Feed:
    """What several pending answers give out, for one coroutine.

    Each item is an answer's index with a chunk, or with None at its end, or with what went wrong.
    """

    def __init__(self, pendings: Sequence[PendingGeneration]) -> None:
        self._calls = get_loop_calls()
        self._items: list[Item] = []
        self._waiting: asyncio.Future[None] | None = None
        for index, pending in enumerate(pendings):
            pending.subscribe(partial(self._put, index))
            pending.future.add_done_callback(partial(self._end, index))

    async def get_all(self) -> list[Item]:
        """Return what there is, at least one item."""
        if not self._items:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        items = self._items
        self._items = []
        return items

    def _put(self, index: int, item: Chunk | BaseException | None) -> None:
        """Take an item, in the engine's thread."""
        self._calls.call(partial(self._accept, (index, item)))

    def _end(self, index: int, future: Any) -> None:
        self._put(index, future.exception())

    def _accept(self, item: Item) -> None:
        """Take an item, in the event loop's thread."""
        self._items.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def write_event(value: Any) -> bytes:
    """Return an event whose data is JSON."""
    return b"data: " + encode_json(value) + b"\n\n"


class EventWriter:
    """Writes events that begin alike: only what differs is made into JSON each time.

    Args:
        empty: an event without choices.
    """

    def __init__(self, empty: ChatEvent | CompletionEvent) -> None:
        self._head, _, self._tail = write_event(empty).rpartition(b"]")

    def write(self, choice: Record) -> bytes:
        """Return the event of a choice."""
        return self._head + encode_json(choice) + b"]" + self._tail


async def wait_for_first(
    events: AsyncGenerator[bytes, None], find_failure: Callable[[BaseException], bytes]
) -> tuple[bytes, AsyncGenerator[bytes, None]]:
    """Return the first event and the others; what fails before it is raised, and has a status of its own.

    A comment is the first where it lets wait; what fails then is an event that `find_failure` writes.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        done, _ = await asyncio.wait([first], timeout=COMMENT_SECONDS)
    except BaseException:
        first.cancel()
        raise
    if done:
        return first.result(), events

    async def go_on() -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(events):
                yield await first
                async for event in events:
                    yield event
        except Exception as error:
            yield find_failure(error)

    return COMMENT, go_on()


class EventStream(Response):
    """An answer of server-sent events; who makes them watches for a client that leaves."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self._first = first
        self._sent = time.monotonic()
        self._events = events
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        async with aclosing(self._events):
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            comments = asyncio.create_task(self._send_comments(send))
            try:
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
                async for event in self._events:
                    self._sent = time.monotonic()
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            finally:
                comments.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_comments(self, send: Send) -> None:
        """Send comments, which clients pass over, while nothing else is sent: proxies end what is still."""
        while True:
            quiet = time.monotonic() - self._sent
            if quiet >= COMMENT_SECONDS:
                self._sent = time.monotonic()
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
            else:
                await asyncio.sleep(COMMENT_SECONDS - quiet)
