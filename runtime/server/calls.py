"""One request to a model: its body read within limits and checked, its model found, its client known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request

from ..asynchronous.loop_calls import get_loop_calls
from .errors import ApiError
from .registry import ServedModel
from .schema import Schema, check
from .settings import ServerSettings

T = TypeVar("T")
SHORT = 2_048  # bytes of a body with so little text that it is tokenized in 0.1 ms
SMALL = 32_768  # bytes of a body that the event loop's thread parses itself
LARGE = 262_144  # bytes of a body that delays no smaller one


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request whose body was checked.

    Attributes:
        body: its parameters; those that were null are left out.
        size: bytes of the body.
        client: whose it is: clients take turns where requests wait.
        timeout: seconds that it may take.
    """

    request: Request
    body: dict[str, Any]
    served: ServedModel
    size: int
    client: str
    timeout: float
    readers: Executor

    def take(self, *names: str, **renamed: str) -> dict[str, Any]:
        """Return the parameters of these names that were given, as options; `option="name"` renames one."""
        options = {name: self.body[name] for name in names if name in self.body}
        return options | {to: self.body[name] for to, name in renamed.items() if name in self.body}

    async def run(self, function: Callable[[], T]) -> T:
        """Run what takes longer than the event loop may, such as reading a prompt, in another thread."""
        return await asyncio.get_running_loop().run_in_executor(self.readers, function)

    async def run_here_if_short(self, function: Callable[[], T]) -> T:
        """Run what takes as long as the body is large: of a short one less than to wake another thread."""
        return function() if self.size <= SHORT else await self.run(function)


class Readers:
    """Threads that read what takes longer than the event loop may.

    Large bodies have one of their own, and grammars too: neither delays what is read soon.
    """

    def __init__(self, count: int) -> None:
        self._usual = ThreadPoolExecutor(count, "planforge-reader")
        self._large = ThreadPoolExecutor(1, "planforge-large-reader")
        self._grammars = ThreadPoolExecutor(1, "planforge-grammar-reader")

    def choose(self, size: int, *, has_grammar: bool = False) -> Executor:
        """Return the threads for a body of so many bytes."""
        if size > LARGE:
            return self._large
        return self._grammars if has_grammar else self._usual

    def close(self) -> None:
        """End the threads when they are done with what they do."""
        for pool in (self._usual, self._large, self._grammars):
            pool.shutdown(wait=False, cancel_futures=True)


async def read_parameters(data: bytes, schema: Schema, readers: Executor) -> dict[str, Any]:
    """Return the parameters of a body, without those that are null."""

    def parse() -> dict[str, Any]:
        value = parse_json(data)
        if not isinstance(value, dict):
            raise ApiError(400, "the body must be a JSON object")
        check(value, schema, "")
        return {name: given for name, given in value.items() if given is not None}

    if len(data) <= SMALL:
        return parse()
    return await asyncio.get_running_loop().run_in_executor(readers, parse)


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """Return a request's body; refuse one that is no JSON, too large, or comes too slowly."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # Pages of other origins can send other types without asking the server first.
        raise ApiError(415, f"the Content-Type must be application/json, not {media_type!r:.80}")
    limit = settings.body_bytes
    length = request.headers.get("content-length", "0")
    parts: list[bytes] = []

    async def read() -> None:
        total = 0
        async for part in request.stream():
            total += len(part)
            if total > limit:
                refuse_large(limit)
            parts.append(part)

    if length.isdecimal() and int(length) > limit:
        refuse_large(limit)
    try:
        with anyio.fail_after(settings.body_seconds):
            await read()
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {settings.body_seconds:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was whole") from None
    return b"".join(parts)


def refuse_large(limit: int) -> NoReturn:
    raise ApiError(413, f"the body is larger than the {limit} bytes that this server takes", code="too_large")


def parse_json(data: bytes) -> Any:
    """Return what JSON says; refuse NaN, too long numbers, too deep nesting and half characters."""
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=refuse_constant)
        if "\\u" in text:  # half of a surrogate pair is no text that could be tokenized or sent back
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:  # also of a number with too many digits
        raise ApiError(
            400, f"the body is not valid JSON in UTF-8: {error}"[:300], code="invalid_json"
        ) from None
    return value


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


@asynccontextmanager
async def cancel_when_gone(request: Request, cancel: Callable[[], object]) -> AsyncIterator[None]:
    """Call `cancel` when the client leaves, or when the block raises."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except BaseException:
        cancel()
        raise
    finally:
        watcher.cancel()


async def wait_for_all(futures: Sequence[Future[T]]) -> list[T]:
    """Return the results of all; raise the first error as soon as it is there. It cancels none."""
    ended = asyncio.get_running_loop().create_future()
    calls = get_loop_calls()
    left = len(futures)

    def accept(future: Future[T]) -> None:
        nonlocal left
        left -= 1
        is_last = not left or future.cancelled() or future.exception() is not None
        if is_last and not ended.done():
            ended.set_result(None)

    for future in futures:
        future.add_done_callback(lambda done: calls.call(partial(accept, done)))
    await ended
    for future in futures:
        if future.cancelled():
            raise ApiError(499, "the client left")
        if future.done() and (error := future.exception()) is not None:
            raise error
    return [future.result() for future in futures]
