"""Names the golden data that a graph, or the plan that is built from it, skips."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ...bundle.artifact import has_role
from ...bundle.manifest import Artifact


@dataclass(frozen=True)
class Skipped:
    """Golden data that is too large for an engine to be compared with."""

    artifact: str  # the graph's id
    what: str  # as in "2 of 7 samples"
    reason: str  # as in "81 tokens are needed, it takes 40"


def skip_too_long(artifact: Artifact, what: str, tokens: int) -> Skipped:
    """Return the entry of what needs more tokens than a graph, or the plan built from it, takes."""
    return Skipped(artifact.id, what, f"{tokens} tokens are needed, it takes {find_room(artifact)}")


def skip_batches(artifact: Artifact, what: str, rows: int, tokens: int) -> Skipped:
    """Return the entry of batches that need more rows or tokens than a graph, or its plan, takes."""
    batch = artifact.axis("batch")
    takes = f"{batch.min} to {batch.max}" if batch.min < batch.max else str(batch.max)
    reason = f"up to {rows} rows of {tokens} tokens are needed, it takes {takes} of {find_room(artifact)}"
    return Skipped(artifact.id, what, reason)


def find_room(artifact: Artifact) -> int:
    """Return the most tokens of one sequence; without end of a graph that reads none, or reads in steps."""
    counts_tokens = artifact.has_axis("tokens") and not has_role(artifact.inputs, "sample")
    return artifact.axis("tokens").max if counts_tokens else sys.maxsize
