"""What the asynchronous models have in common, and how an event loop waits for other threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

from ..model import Model
from .loop_calls import get_loop_calls

if TYPE_CHECKING:
    from typing_extensions import Self

M = TypeVar("M", bound=Model)
T = TypeVar("T")


class AsyncModel(Generic[M]):
    """Base of the asynchronous models: a model whose requests are awaited.

    All work is done in other threads, reading and tokenizing too. The requests of all tasks share the
    engine. A task that is cancelled, by `asyncio.timeout` for one, cancels its request.

    Args:
        model: the model that runs; it has all that an asynchronous model lacks.
        client: whose requests these are: where requests wait, clients take turns. Several asynchronous
            models, one for each client, may share a model.
    """

    def __init__(self, model: M, client: str = "") -> None:
        self.model = model
        self.client = client

    async def close(self) -> None:
        """End the requests of all clients with a ClosedError, and free the engine; closing twice is fine."""
        await run_in_thread(self.model.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r})"


async def run_in_thread(function: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Return what a function returns in another thread; it is undone where nobody waits for it any more."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:

        def undo_result(done: asyncio.Future[T]) -> None:
            if not done.cancelled() and done.exception() is None and undo is not None:
                undo(done.result())

        running.add_done_callback(undo_result)
        raise


async def wait_for_result(future: Future[T], cancel: Callable[[], object]) -> T:
    """Return a future's result when it is there; call `cancel` where nobody waits for it any more."""
    calls = get_loop_calls()
    done = asyncio.Event()
    future.add_done_callback(lambda _: calls.call(done.set))
    try:
        await done.wait()
    except asyncio.CancelledError:
        cancel()
        raise
    return future.result()
