"""A check: what a package's runtime is asked, and what is judged by its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...runtime.diagnostics.metrics import Outcome
from .worker import Question

Answer: TypeAlias = Mapping[str, Any]
Judge: TypeAlias = Callable[[Sequence[Answer]], Outcome]


@dataclass(frozen=True)
class Check:
    """Questions, and what is judged by their answers."""

    case: str
    questions: list[Question]
    judge: Judge
    of_files: bool = False  # whether it is of tokenizer and template rather than of a graph
