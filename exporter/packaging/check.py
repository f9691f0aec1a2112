"""A check: the questions to a package's runtime, and the judgement of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...runtime.apps.check.outcome import Outcome
from .worker import Question

Answer: TypeAlias = Mapping[str, Any]
Judge: TypeAlias = Callable[[Sequence[Answer]], Outcome]

MAX_REPORTED = 3  # differences of a check that are reported
CONTEXT = 20  # characters, or ids, that a message shows before a difference; behind it twice as many


@dataclass(frozen=True)
class Check:
    """Questions to a runtime, and the function that judges their answers."""

    case: str
    questions: list[Question]
    judge: Judge
    of_files: bool = False  # whether it is of tokenizer and template rather than of a graph


def report(unit: str, count: int, failures: Sequence[str]) -> Outcome:
    """Return the outcome of a check that compared `count` texts or settings; comparing none is a failure."""
    if count == 0:
        failures = [f"no {unit} could be compared, as the bundle's golden data has none: export it again"]
    return Outcome({unit: count, "differ": len(failures)}, {}, tuple(failures[:MAX_REPORTED]))


def describe_difference(got: Any, want: Any) -> str:
    """Return both results in words, around the first character, or id, in which they differ."""
    if isinstance(got, str | list) and isinstance(want, str | list) and got and want:
        place = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
        if place is None:
            place = min(len(got), len(want))
        begin = max(0, place - CONTEXT)
        end = place + 2 * CONTEXT
        where = f" from {begin} on" if begin else ""
        return f"gives {got[begin:end]!r}{where}, wanted is {want[begin:end]!r}"
    return f"gives {got!r:.200}, wanted is {want!r:.200}"
