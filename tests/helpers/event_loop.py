"""Runs a test's coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .patience import PATIENCE

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine, but not for ever."""
    return asyncio.run(asyncio.wait_for(main, PATIENCE))


async def wait_until(holds: Callable[[], bool]) -> None:
    """Wait, without keeping the loop from its work."""
    while not holds():
        await asyncio.sleep(0.001)
