"""Runs a beam search together with PyTorch, which scores the results and is compared at each step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.case import Case, CaseSet, Text
from ...runtime.apps.check.metrics import ErrorMetrics, Logits, ScoreMetrics, measure_error, measure_scale
from ...runtime.apps.check.translator import SEARCH, TranslatorEngine, make_search
from ..limits import Gaps
from ..reference_model import is_module

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel
    from .pytorch_translator import Reference, ReferenceRun
    from .rounding import Rounding


def follow(engine: TranslatorEngine, reference: Reference, case_set: CaseSet) -> TranslatorEngine:
    """Return the engine together with PyTorch, which follows its searches."""
    return replace(engine, model=PyTorchModel(reference, case_set))


class PyTorchModel:
    """A PyTorch model that follows an engine's search, and scores the targets that it finds."""

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
    """PyTorch following an engine's beam search, each source by itself and without padding."""

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


class RecordedRun:
    """A run of PyTorch that records its rows' tokens and its logits, to be replayed when rounded."""

    def __init__(self, run: ReferenceRun) -> None:
        self.run = run
        self.fed: list[tuple[int, ...]] = []
        self.logits: list[Logits] = []
        self.copies: list[Sequence[tuple[int, int]]] = []

    def decode(self, tokens: Sequence[int]) -> Logits:
        self.fed.append(tuple(tokens))
        self.logits.append(self.run.decode(tokens))
        return self.logits[-1]

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        self.copies.append(copies)
        self.run.copy_rows(copies)

    def replay(self, run: ReferenceRun) -> Iterator[tuple[Logits, Logits]]:
        """Yield the logits (K, V) of another run in each step, and those that this run gave."""
        for tokens, copies, logits in zip(self.fed, self.copies, self.logits, strict=True):
            yield run.decode(tokens), logits
            run.copy_rows(copies)


def measure_found_gaps(
    reference: Reference,
    model: ReferenceModel,
    case_set: CaseSet,
    found: Sequence[Text],
    rounding: Rounding,
) -> Gaps:
    """Measure how rounding affects the scores of found targets, and the logits that lead a search.

    A search is compared in each of its steps. So PyTorch's own search is replayed, rounded, with the beams
    that it prunes: rounding moves these further than the targets that it finds.
    """
    from .pytorch_translator import compute_score

    assert is_module(model)
    scales = find_scales(case_set)
    pairs = [(case_set.texts[text.source].tokens, text) for text in found if text.source is not None]
    searches = record_searches(reference, case_set, found)
    errors = []
    with rounding.apply(model):
        rounded = [reference.compute_results(source, text.tokens[1:])[0] for source, text in pairs]
        for number, search in searches.items():
            run = reference.start_run(case_set.texts[number].tokens, len(search.fed[0]))
            errors += [measure_error(got, want, scales[number]) for got, want in search.replay(run)]
    scores = []
    for (source, text), logits in zip(pairs, rounded, strict=True):
        target = text.tokens[1:]
        exact, _ = reference.compute_results(source, target)
        scores.append(abs(compute_score(logits, target) - compute_score(exact, target)))
        assert text.source is not None
        errors.append(measure_error(logits, exact, scales[text.source]))
    worst = float(np.max(scores))
    error = float(np.max(errors))
    return {
        "score": ScoreMetrics(worst, math.isfinite(worst), len(scores)),
        SEARCH: ErrorMetrics(error, math.isfinite(error), len(errors)),
    }


def record_searches(reference: Reference, case_set: CaseSet, found: Sequence[Text]) -> dict[int, RecordedRun]:
    """Return PyTorch's own search for each source whose targets were found."""
    search = make_search(case_set)
    runs = {}
    for source in dict.fromkeys(text.source for text in found):
        assert source is not None
        tokens = case_set.texts[source].tokens
        runs[source] = RecordedRun(reference.start_run(tokens, search.num_beams))
        reference.search(tokens, search, runs[source])
    return runs


def find_scales(case_set: CaseSet) -> dict[int, float]:
    """Return the unit of logits' errors for each source: that of the target that PyTorch writes for it."""
    logits = case_set.answers["logits"]
    return {
        source: measure_scale(known.values)
        for number, known in logits.items()
        if (source := case_set.texts[number].source) is not None
    }
