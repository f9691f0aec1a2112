"""A check: what a package's runtime is asked, and what is judged by its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ...runtime.bundle.artifact import Artifact
from ...runtime.diagnostics.golden.texts import FILES
from ...runtime.diagnostics.metrics import Comparison, Outcome
from .worker import Question, Worker

Answer: TypeAlias = Mapping[str, Any]
Judge: TypeAlias = Callable[[Sequence[Answer]], Outcome]


@dataclass(frozen=True)
class Check:
    """Questions, and what is judged by their answers."""

    case: str
    questions: list[Question]
    judge: Judge
    of_files: bool = False  # whether it is of tokenizer and template rather than of a graph


def run_checks(
    worker: Worker,
    folder: Path,
    options: Mapping[str, Any],
    artifact: Artifact,
    checks: Sequence[Check],
    title: str,
) -> tuple[str, list[Comparison]]:
    """Ask a runtime, by its title, everything at once; return its version, and what came of each check."""
    questions = [question for check in checks for question in check.questions]
    answers = worker.ask(folder, options, questions)
    rest = list(answers.answers)
    comparisons = []
    for check in checks:
        given, rest = rest[: len(check.questions)], rest[len(check.questions) :]
        outcome = check.judge(given)
        name = FILES if check.of_files else artifact.id
        comparisons.append(
            Comparison(artifact=name, backend=f"{title} {answers.version}", case=check.case, **vars(outcome))
        )
    return answers.version, comparisons
