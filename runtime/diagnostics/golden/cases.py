"""The cases in which a graph is compared with golden data, and the golden data that it skips."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ...bundle.manifest import Artifact
from ..metrics import Outcome

Case: TypeAlias = "Callable[[], Outcome]"


@dataclass(frozen=True)
class Skipped:
    """Golden data that is too large for an engine to be compared with."""

    artifact: str  # the graph's id
    what: str  # as in "2 of 7 samples"
    reason: str  # as in "81 tokens are needed, it takes 40"


def skip_too_long(artifact: Artifact, what: str, tokens: int) -> Skipped:
    """Return the entry of what needs more tokens than a graph, or the plan built from it, takes."""
    return Skipped(artifact.id, what, f"{tokens} tokens are needed, it takes {find_room(artifact)}")


def find_room(artifact: Artifact) -> int:
    """Return the most tokens of one sequence."""
    return artifact.axis("tokens").max
