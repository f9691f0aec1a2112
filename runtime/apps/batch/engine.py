"""What computes a job's parts: processes of this machine, or a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from .part_runner import Failure
from .plan import Part
from .result import PartResult


@dataclass(frozen=True)
class Lost:
    """A worker died with a part, or the machine that it was on."""

    reason: str


Outcome: TypeAlias = PartResult | Failure | Lost


class Engine(Protocol):
    """Computes parts on workers, each of which loads the model once."""

    def count_slots(self) -> int:
        """Return how many parts may be started at a time; it may change."""

    def start(self, part: Part) -> None:
        """Let a worker compute a part."""

    def wait(self) -> list[tuple[Part, Outcome]]:
        """Return the parts that ended since the last call, at least one of those that were started."""

    def close(self) -> None:
        """End the workers, whatever they are at."""
