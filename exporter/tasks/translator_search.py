"""Runs a beam search beside PyTorch, which scores what it finds and is compared with each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.case import Case, CaseSet, Text
from ...runtime.apps.check.metrics import ErrorMetrics, Logits, ScoreMetrics, measure_error, measure_scale
from ...runtime.apps.check.translator import SEARCH, TranslatorEngine
from ..limits import Gaps
from ..reference_model import is_module

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel
    from .pytorch_translator import Reference
    from .rounding import Rounding


def follow(engine: TranslatorEngine, reference: Reference, case_set: CaseSet) -> TranslatorEngine:
    """Return the engine with PyTorch, which goes along with its searches."""
    return replace(engine, model=PyTorchModel(reference, case_set))


class PyTorchModel:
    """PyTorch, which scores the targets that an engine's search finds, and goes along with it."""

    def __init__(self, reference: Reference, case_set: CaseSet) -> None:
        self.reference = reference
        self.scales = find_scales(case_set)

    def score(self, source: Sequence[int], target: Sequence[int]) -> float:
        return self.reference.score(source, tuple(target[1:]))

    def follow(self, case_set: CaseSet, case: Case) -> SearchFollower:
        assert case_set.search is not None
        numbers = [case_set.texts[row.text].source for row in case.rows]
        sources = [(case_set.texts[n].tokens, self.scales[n]) for n in numbers if n is not None]
        return SearchFollower(self.reference, sources, case_set.search.num_beams)


class SearchFollower:
    """PyTorch beside an engine's beam search, each source by itself and without padding."""

    def __init__(
        self, reference: Reference, sources: Sequence[tuple[tuple[int, ...], float]], beams: int
    ) -> None:
        self.beams = beams
        self.runs = [reference.start_run(source, beams) for source, _ in sources]
        self.scales = [scale for _, scale in sources]  # of the errors of each
        self.errors: list[float] = []

    def compare(self, logits: Logits, tokens: Sequence[int], active: Sequence[bool]) -> None:
        for number, run in enumerate(self.runs):
            rows = self.find_rows(number)
            if active[rows.start]:
                want = run.decode(tokens[rows])
                self.errors.append(measure_error(logits[rows], want, self.scales[number]))

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        for number, run in enumerate(self.runs):
            rows = self.find_rows(number)
            run.copy_rows(
                [(a - rows.start, b - rows.start) for a, b in copies if rows.start <= a < rows.stop]
            )

    def find_rows(self, number: int) -> slice:
        """Return the rows of a source, which are adjacent."""
        return slice(number * self.beams, (number + 1) * self.beams)


def measure_found_gaps(
    reference: Reference,
    model: ReferenceModel,
    case_set: CaseSet,
    found: Sequence[Text],
    rounding: Rounding,
) -> Gaps:
    """Measure the logits and scores that rounding gives the targets of beam searches."""
    from .pytorch_translator import compute_score

    assert is_module(model)
    scales = find_scales(case_set)
    pairs = [(case_set.texts[text.source].tokens, text) for text in found if text.source is not None]
    with rounding.apply(model):
        rounded = [reference.compute_results(source, text.tokens[1:])[0] for source, text in pairs]
    scores = []
    errors = []
    for (source, text), logits in zip(pairs, rounded, strict=True):
        target = text.tokens[1:]
        exact, _ = reference.compute_results(source, target)
        scores.append(abs(compute_score(logits, target) - compute_score(exact, target)))
        assert text.source is not None
        errors.append(measure_error(logits, exact, scales[text.source]))
    worst = float(np.max(scores))
    error = max(errors)
    return {
        "score": ScoreMetrics(worst, math.isfinite(worst), len(scores)),
        SEARCH: ErrorMetrics(error, math.isfinite(error), len(errors)),
    }


def find_scales(case_set: CaseSet) -> dict[int, float]:
    """Return the unit of logits' errors of each source: that of the target that PyTorch writes to it."""
    logits = case_set.answers["logits"]
    return {
        source: measure_scale(known.values)
        for number, known in logits.items()
        if (source := case_set.texts[number].source) is not None
    }
