"""What a graph is held against, and what it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ...bundle.manifest import Artifact
from ..metrics import Outcome

Case: TypeAlias = "Callable[[], Outcome]"


@dataclass(frozen=True)
class Skipped:
    """Golden data that an engine takes too little to be held against.

    Attributes:
        artifact: the graph's id.
        what: as in "2 of 7 samples".
        reason: as in "81 tokens are needed, it takes 40".
    """

    artifact: str
    what: str
    reason: str


def too_long(artifact: Artifact, what: str, tokens: int) -> Skipped:
    """Of what needs more tokens than a graph, or the plan built from it, takes."""
    return Skipped(artifact.id, what, f"{tokens} tokens are needed, it takes {longest(artifact)}")


def longest(artifact: Artifact) -> int:
    """The most tokens of one sequence."""
    return artifact.axis("tokens").max
