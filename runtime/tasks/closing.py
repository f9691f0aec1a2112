"""What every model has: the engine that runs it, and an end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

C = TypeVar("C", bound="Closing")


class Closing(ABC):
    """Base of what has a close(), for a with statement.

    Attributes:
        backend: the engine that runs it, such as "ort-cpu"; `load` sees to it.
    """

    backend: str = ""

    @abstractmethod
    def close(self) -> None:
        """Frees the engine."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
