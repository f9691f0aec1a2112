"""One request to a model: its body read within limits and checked, its model found, its client known."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import anyio
import msgspec
from starlette.requests import ClientDisconnect, Request

from ...asynchronous.loop_calls import get_loop_calls
from ...errors import DeadlineError
from ...scheduling.steps import Steps, run_all
from .bodies import Body
from .decode_body import decode_body
from .errors import ApiError
from .form_data import MEDIA_TYPE as FORM
from .form_data import decode_form
from .json_text import JsonResponse
from .readers import Job, Readers, WorkerPool
from .registry import ServedModel
from .settings import ServerSettings

T = TypeVar("T")
B = TypeVar("B", bound=Body)
Asked = TypeVar("Asked", bound=Body, covariant=True)
SHORT = 2_048  # bytes of text that is tokenized in 0.1 ms
SMALL = 32_768  # bytes of a body that the event loop's thread parses itself
PART = 16_384  # bytes of gzip that are decoded at a time: each member in them copies what is behind it
LATE = "the request timed out before it was processed; send it again, or give a longer timeout"
GONE = "the client left"


@dataclass(frozen=True, kw_only=True)
class Call(Generic[Asked]):
    """A request whose body was checked.

    Attributes:
        body: its parameters; those that were left out are None.
        size: bytes of the body.
        client: whose it is: clients take turns where requests wait.
        deadline: of time.monotonic(), by which its answer must be there.
        max_bytes: of texts that may be read for it, also where one is read several times.
    """

    request: Request
    body: Asked
    served: ServedModel
    size: int
    client: str
    deadline: float
    max_bytes: int
    readers: Readers

    @property
    def timeout(self) -> float:
        """The seconds that are left to it; raises a DeadlineError where there are none."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(LATE)
        return left

    def take(self, *names: str, **renamed: str) -> dict[str, Any]:
        """Return the parameters of these names that were given, as options; `option="name"` renames one."""
        places = {name: name for name in names} | renamed
        given = {to: getattr(self.body, name) for to, name in places.items()}
        return {to: msgspec.to_builtins(value) for to, value in given.items() if value is not None}

    async def read(self, steps: Steps[T], size: int) -> T:
        """Run the steps that read so many bytes: of few in less time than it takes to wake another thread."""
        if size <= SHORT:
            return run_all(steps)
        return await self.run_steps(steps, self.readers.choose(size))

    async def run(self, function: Callable[[], T], *, begun: bool = False) -> T:
        """Run what takes longer than the event loop may in another thread; see `run_steps`."""
        pool = self.readers.choose(self.size)
        return await self.run_steps(make_step(function), pool, begun=begun)

    async def write(self, steps: Steps[Any], *, few: bool = False) -> JsonResponse:
        """Return the answer that steps make; of all but a few numbers and words in another thread."""

        def write_all() -> Steps[JsonResponse]:
            value = yield from steps
            return JsonResponse(value)

        if few:
            return run_all(write_all())
        return await self.run_steps(write_all(), self.readers.choose(self.size), begun=True)

    async def run_amid_answer(self, function: Callable[[], T]) -> T:
        """Run what takes longer than the event loop may while somebody else watches the client."""
        job: Job[T] = Job(make_step(function), self.client)
        self.readers.choose(self.size).put(job, begun=True)
        (result,) = await wait_for_all([job.future])
        return result

    async def explain(self, function: Callable[[Callable[[], None]], T]) -> T:
        """Run what takes seconds, one at a time for all clients; see `run_steps`.

        The function gets what it has to call now and then, which ends it when nobody waits for it any more.
        """
        job: Job[T] = Job(make_step(lambda: function(job.check)), self.client)
        return await run_steps(self.request, job, self.readers.explaining, self.deadline)

    async def run_steps(self, steps: Steps[T], pool: WorkerPool, *, begun: bool = False) -> T:
        """Run steps in another thread, as long as the client is there and its deadline has not passed.

        A full queue refuses them, unless the request was answered in part (`begun`).
        """
        return await run_steps(self.request, Job(steps, self.client), pool, self.deadline, begun=begun)


def make_step(function: Callable[[], T]) -> Steps[T]:
    """Return a function as the only step."""
    return function()
    yield


async def run_steps(
    request: Request, job: Job[T], pool: WorkerPool, deadline: float, *, begun: bool = False
) -> T:
    """Return the result of a request's job; end it when the client leaves or the deadline passes."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError(LATE)
    pool.put(job, begun=begun)
    timer = asyncio.get_running_loop().call_later(left, lambda: pool.stop(job, DeadlineError(LATE)))
    try:
        async with cancel_when_gone(request, lambda: pool.stop(job, ApiError(499, GONE))):
            (result,) = await wait_for_all([job.future])
        return result
    finally:
        timer.cancel()


async def read_parameters(
    request: Request, data: bytes, kind: type[B], readers: Readers, deadline: float
) -> B:
    """Return the parameters of a request's body; a form or a large body is decoded in another thread."""
    decode = partial(decode_body, data, kind)
    if find_media_type(request) == FORM:
        decode = partial(decode_form, data, request.headers, kind)
    elif len(data) <= SMALL:
        return decode()
    job = Job(make_step(decode), request.state.client)
    return await run_steps(request, job, readers.choose(len(data)), deadline)


async def read_body(request: Request, settings: ServerSettings, takes_form: bool) -> bytes:
    """Return a request's body; refuse one of a wrong type, too large, or that comes too slowly."""
    check_media_type(request, settings, takes_form)
    limit = settings.body_bytes
    inflate = find_decoder(request.headers.get("content-encoding", "identity"), limit)
    length = request.headers.get("content-length", "0")
    parts: list[bytes] = []

    async def read() -> None:
        encoded = decoded = 0
        async for part in request.stream():
            encoded += len(part)
            for begin in range(0, len(part), PART):
                parts.append(inflate(part[begin : begin + PART]))
                decoded += len(parts[-1])
                if max(encoded, decoded) > limit:
                    refuse_large(limit)

    if length.isdecimal() and int(length) > limit:
        refuse_large(limit)
    try:
        with anyio.fail_after(settings.body_seconds):
            await read()
    except TimeoutError:
        reason = f"the request body did not arrive within {settings.body_seconds:g} s"
        raise ApiError(408, reason, code="too_slow") from None
    except ClientDisconnect:
        raise ApiError(400, "the client disconnected before sending the whole request") from None
    return b"".join(parts)


def find_media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def check_media_type(request: Request, settings: ServerSettings, takes_form: bool) -> None:
    """Refuse what is no JSON: pages of other origins can send other types without asking the server first.

    Where a form is taken, one that comes from a page has to be of an origin that the server allows.
    """
    media_type = find_media_type(request)
    if media_type == "application/json":
        return
    if not (takes_form and media_type == FORM):
        allowed = f"application/json{f' or {FORM}' if takes_form else ''}"
        reason = f"the Content-Type must be {allowed}, not {media_type!r:.80}"
        raise ApiError(415, reason, code="not_json")
    origin = request.headers.get("origin")
    if origin is not None and not {"*", origin} & set(settings.origins):
        reason = f"pages of {origin!r:.80} may not send forms; send JSON, or allow them by --cors-origin"
        raise ApiError(403, reason, code="origin")


def find_decoder(encoding: str, limit: int) -> Callable[[bytes], bytes]:
    """Return what decodes each part of a body, up to a byte more than the limit."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return lambda part: part
    if name not in ("gzip", "x-gzip"):
        reason = f"the Content-Encoding must be gzip or identity, not {encoding!r:.80}"
        raise ApiError(415, reason, code="unsupported_encoding")
    decoder = zlib.decompressobj(wbits=31)

    def inflate(part: bytes) -> bytes:
        nonlocal decoder
        decoded = b""
        try:
            while part and len(decoded) <= limit:
                if decoder.eof:  # another member of gzip follows
                    decoder = zlib.decompressobj(wbits=31)
                decoded += decoder.decompress(part, limit + 1 - len(decoded))
                part = decoder.unused_data
        except zlib.error as error:
            raise ApiError(400, f"the body is not valid gzip: {error}", code="invalid_encoding") from None
        return decoded

    return inflate


def refuse_large(limit: int) -> NoReturn:
    raise ApiError(
        413, f"the request body is larger than {limit} bytes, the limit of this server", code="too_large"
    )


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
            raise ApiError(499, GONE)
        if future.done() and (error := future.exception()) is not None:
            raise error
    return [future.result() for future in futures]
