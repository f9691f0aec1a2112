"""The JSON of answers, written by msgspec: json.dumps takes ten times as long, and lets nobody else run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...scheduling.steps import Steps

T = TypeVar("T")
PIECE = 2**18  # bytes of an answer that are sent at once


def encode_json(value: Any) -> bytes:
    """Return JSON in UTF-8; a number that is not finite becomes null."""
    return msgspec.json.encode(value)


class JsonResponse(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return encode_json(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; a large one in pieces, between which the event loop answers others."""
        body = self.body
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for begin in range(0, len(body), PIECE):
            end = begin + PIECE
            more = end < len(body)
            await send({"type": "http.response.body", "body": bytes(body[begin:end]), "more_body": more})
            await asyncio.sleep(0)  # `send` alone waits only where the client is slow
        if self.background is not None:
            await self.background()


def encode_pieces(write: Callable[[int, T], Any], results: Iterable[T]) -> Steps[list[msgspec.Raw]]:
    """Return the JSON of each result, in a step each: a long answer in one piece would hold up all others.

    `write` gets a result's index, and the result. What is returned becomes part of a greater value's JSON.
    """
    pieces: list[msgspec.Raw] = []
    for index, result in enumerate(results):
        if index:
            yield
        pieces.append(msgspec.Raw(encode_json(write(index, result))))
    return pieces
