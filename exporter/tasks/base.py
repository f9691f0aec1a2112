"""The row of a task: the cases that its graphs are compared in, and the code to answer them in PyTorch.

The other half, `run`, is in runtime/apps/check, and needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...runtime.apps.check.case import Case, CaseSet, Known, Measure, Row, Text
from ...runtime.apps.check.case_arrays import to_arrays
from ...runtime.apps.check.files import fits
from ...runtime.apps.check.judge import Engine, Limits
from ...runtime.apps.stage_progress import PartCounter, Report, report_nothing
from ...runtime.backends.backend import Program
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ..errors import VerificationError
from ..levels import STANDARD, Level
from ..limits import Gaps
from .ranked import drop_ranking

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel
    from .rounding import Rounding

Progress: TypeAlias = Callable[[str], None]
OpenProgram: TypeAlias = Callable[[Artifact], Program]
Asked: TypeAlias = "tuple[CaseSet, Sequence[int]]"


def choose_all(case_set: CaseSet, rounding: Rounding) -> Asked:
    """Return all texts, as each tells how rounding affects results."""
    return case_set, ()


@dataclass(frozen=True)
class Task:
    """A task: the code that differs between tasks when graphs are compared with PyTorch.

    Attributes:
        choose: returns cases without answers: besides the model, all that the answers depend on.
        open_reference: returns what asks the model. Of a rounding only keys and values are rounded there.
        answer_texts: yields PyTorch's answers to texts, by their numbers and outputs.
        calibrate: runs PyTorch over the texts to calibrate with.
        read_row: runs PyTorch over what a row of a case reads.
        open: opens a graph, and the one that it runs with if there is one.
        list_measures: returns what has limits.
        kept: how many places golden data keeps, and fewer where the file is full.
        count_kept: returns how many of an output's places in a text that is; None for all.
        complete: returns a set whose texts have what PyTorch writes.
        answer_again: returns golden data's cases with PyTorch's answers of now, as `answer` gives them.
        thin: returns a set with so few texts, where there are many.
        choose_for_gaps: returns which texts tell what rounding does, and of which the ends count as a
            context's end.
        mean_over: of how many places of a text alone a mean may be taken in a case; None for all of them.
        limit_others: returns the limits of what no table has caps of.
        follow: returns an engine whose searches PyTorch goes along with.
        measure_found: returns what rounding does to targets that a search finds.
        calibrates_by: the level of verification whose cases calibration reads.
        rounds_rows: whether int8 graphs round what their products read by texts.
    """

    choose: Callable[[ReferenceModel, Bundle, Sequence[str], int, Level], CaseSet]
    open_reference: Callable[[ReferenceModel, Bundle, Rounding | None], Any]
    answer_texts: Callable[[Any, CaseSet, Sequence[int]], Iterator[tuple[int, dict[str, Known]]]]
    calibrate: Callable[[Any, CaseSet], None]
    read_row: Callable[[Any, CaseSet, Case, Row], object]
    open: Callable[[Bundle, Artifact, OpenProgram], Engine]
    list_measures: Callable[[CaseSet], Sequence[Measure]]
    kept: Sequence[tuple[int, ...]]
    count_kept: Callable[[CaseSet, str, int, tuple[int, ...]], int | None]
    complete: Callable[[Any, CaseSet], CaseSet] = lambda reference, case_set: case_set
    answer_again: Callable[[Any, Callable[[CaseSet], CaseSet], CaseSet], CaseSet] = (
        lambda reference, answer, golden: answer(golden)
    )
    thin: Callable[[CaseSet, int], CaseSet] = lambda case_set, texts: case_set
    choose_for_gaps: Callable[[CaseSet, Rounding], Asked] = choose_all
    mean_over: Sequence[int | None] = ()
    limit_others: Callable[[CaseSet, Gaps, Limits], dict[str, float]] = lambda case_set, gaps, limits: {}
    follow: Callable[[Any, Any, CaseSet], Engine] = lambda engine, reference, case_set: engine
    measure_found: Callable[[Any, ReferenceModel, CaseSet, Sequence[Text], Rounding], Gaps] | None = None
    calibrates_by: Level = STANDARD
    rounds_rows: bool = False

    def answer(
        self,
        model: ReferenceModel,
        bundle: Bundle,
        case_set: CaseSet,
        report: Report = report_nothing,
        rounding: Rounding | None = None,
    ) -> CaseSet:
        """Return the set with PyTorch's answers; if rounded, those of the same texts in that precision.

        A rounding of weights is applied by the caller, for all that is asked of the model then.
        """
        reference = self.open_reference(model, bundle, rounding)
        case_set = self.complete(reference, case_set)
        numbers = sorted({number for by_text in case_set.answers.values() for number in by_text})
        parts = PartCounter(report, len(numbers))
        answers: dict[str, dict[int, Known]] = {}
        for number, found in self.answer_texts(reference, case_set, numbers):
            for output, known in found.items():
                if rounding is None and not np.isfinite(known.values).all():
                    raise VerificationError(
                        "the PyTorch model's own results are not finite; check its weights"
                    )
                answers.setdefault(output, {})[number] = known
            parts.finish_one()
        return replace(case_set, answers=answers)

    def thin_for_file(self, case_set: CaseSet) -> CaseSet:
        """Return the set in golden data's form, with few places of each text, as whole logits are large."""
        case_set = thinned = drop_ranking(case_set)
        for counts in self.kept:
            answers: dict[str, dict[int, Known]] = {}
            for output, by_text in case_set.answers.items():
                answers[output] = {}
                for text, known in by_text.items():
                    most = self.count_kept(case_set, output, text, counts)
                    answers[output][text] = known if most is None else known.thin(most)
            thinned = replace(case_set, answers=answers)
            if fits(to_arrays(thinned)):
                break
        return thinned


def find_partner(bundle: Bundle, artifact: Artifact, graph: str) -> Artifact:
    """Return the artifact of a graph that fits one best: itself, else of the same precision and dialect."""
    if artifact.graph == graph:
        return artifact
    others = [other for other in bundle.manifest.artifacts if other.graph == graph]
    return max(others, key=lambda a: (a.precision == artifact.precision, a.dialect == artifact.dialect))


def list_wanted(case_set: CaseSet, text: int) -> dict[str, Known]:
    """Return the wanted results of a text, by output."""
    return {output: by_text[text] for output, by_text in case_set.answers.items() if text in by_text}
