"""Work that is done in steps, between which others have their turn, or its caller ends it."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]


def run_all(steps: Steps[T]) -> T:
    """Return the result of all steps, one right behind the other."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
