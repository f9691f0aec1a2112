"""Runs a package in its runtime, and judges its answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from ...runtime.apps.check.outcome import Comparison
from ...runtime.apps.check.texts import FILES
from ...runtime.bundle.artifact import Artifact
from ...runtime.bundle.bundle import Bundle
from ..tensorrt.plans import Progress
from .check import Check
from .recipes import Recipe
from .settings_check import compare_settings
from .worker import Answers, Worker

log = logging.getLogger("planforge")


def run_package(
    bundle: Bundle,
    recipe: Recipe,
    worker: Worker,
    folder: Path,
    artifacts: Sequence[Artifact],
    progress: Progress,
) -> tuple[str, list[Comparison]]:
    """Run all graphs of a package; return the runtime's version, and the outcome of each case.

    All precisions have the same tokenizer and settings, which are compared once.
    """
    version = ""
    comparisons = [compare_settings(bundle, artifacts[-1], folder, recipe.title)]
    for number, precision in enumerate(dict.fromkeys(artifact.precision for artifact in artifacts)):
        own = [artifact for artifact in artifacts if artifact.precision == precision]
        checks = [check for check in recipe.list_checks(bundle, own[-1]) if number == 0 or not check.of_files]
        version, compared = run_precision(bundle, recipe, worker, folder, own, checks, progress)
        comparisons += compared
    return version, comparisons


def run_precision(
    bundle: Bundle,
    recipe: Recipe,
    worker: Worker,
    folder: Path,
    artifacts: Sequence[Artifact],
    checks: Sequence[Check],
    progress: Progress,
) -> tuple[str, list[Comparison]]:
    """Run the graphs of one precision on each engine.

    Texts are read by the runtime, whatever its engine, so one alone is asked for them.
    """
    decides = artifacts[-1]  # a decoder, where there are two
    comparisons: list[Comparison] = []
    options = recipe.choose_options(bundle, decides.precision)
    weights = sum(bundle.path(name).stat().st_size for name in {n for a in artifacts for n in a.data})
    version = ""
    for engine in recipe.engines:
        if weights > engine.max_bytes:
            log.warning(
                "%s is not run %s: it has %.1f GB of weights, and the limit there is %.1f GB",
                decides.id,
                engine.name,
                weights / 1e9,
                engine.max_bytes / 1e9,
            )
            continue
        progress(f"running {decides.precision} in {recipe.title} {engine.name}".rstrip())
        questions = [question for check in checks for question in check.questions]
        answers = worker.ask(folder, {**options, **engine.options}, questions)
        version = answers.version
        title = f"{recipe.title} {version} {engine.name}".rstrip()
        comparisons += judge_answers(checks, answers, decides, title)
        checks = [check for check in checks if not check.of_files]
    return version, comparisons


def judge_answers(
    checks: Sequence[Check], answers: Answers, artifact: Artifact, title: str
) -> list[Comparison]:
    """Return the outcome of each check."""
    rest = list(answers.answers)
    comparisons = []
    for check in checks:
        own = rest[: len(check.questions)]
        rest = rest[len(check.questions) :]
        outcome = check.judge(own)
        name = FILES if check.of_files else artifact.id
        comparisons.append(Comparison(artifact=name, backend=title, case=check.case, **vars(outcome)))
    return comparisons
