"""What every model has: the graph and the engine that run, and an end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

from ..bundle.manifest import Artifact

C = TypeVar("C", bound="Closing")


class Closing(ABC):
    """Base of what has a close(), for a with statement.

    Attributes:
        backend: the engine that runs it, such as "ort-cpu"; `load` sees to it.
        family: the architecture, such as "gpt2"; `load` sees to it.
        threads: cores that the engine uses, where it says; `load` sees to it.
    """

    backend: str = ""
    family: str = ""
    threads: int | None = None

    @property
    @abstractmethod
    def artifact(self) -> Artifact:
        """The graph that runs; where there are several, the one that takes the time."""

    @abstractmethod
    def close(self) -> None:
        """Frees the engine."""

    def __repr__(self) -> str:
        threads = ""
        if self.threads is not None:
            threads = f"{self.threads} thread" if self.threads == 1 else f"{self.threads} threads"
        facts = (self.family, self.artifact.id, self.backend, threads)
        return f"{type(self).__name__}({', '.join(fact for fact in facts if fact)})"

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
