"""Measures how far PyTorch is from itself when it rounds to a precision; the limits follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.apps.check import metrics
from ...runtime.apps.check.case import CaseSet, Measure
from ...runtime.apps.check.files import Arrays
from ...runtime.apps.check.judge import Seen, measure_columns, measure_passages, measure_values
from ...runtime.apps.check.metrics import ClassMetrics, LabelMetrics, Measured, Metrics, VectorMetrics
from ...runtime.bundle.bundle import Bundle
from ..limits import Gaps
from ..reference_model import is_module
from .base import Task, list_wanted
from .random_cases import CONTEXT_ROWS

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel
    from .rounding import Rounding

KEYS = {"passages": "text", "beams": "score"}  # of gaps whose limits' names have no beginning of their own


def measure_gaps(
    task: Task, model: ReferenceModel, bundle: Bundle, case_set: CaseSet, rounding: Rounding
) -> Gaps:
    """Measure how far the rounded model is from the unrounded one, by the prefixes of limits' names."""
    assert is_module(model)
    asked, ends = task.choose_for_gaps(case_set, rounding)
    with rounding.apply(model):
        rounded = task.answer(model, bundle, asked, rounding=rounding)
    gaps = compare_answers(task, asked, rounded, ends)
    found = [case_set.texts[number] for number in case_set.answers.get("score", {})]
    if task.measure_found is not None and found:
        reference = task.open_reference(model, bundle, None)
        gaps |= task.measure_found(reference, model, case_set, found, rounding)
    return gaps


def gaps_to_arrays(gaps: Gaps) -> Arrays:
    """Return gaps as arrays, by their keys, kinds and fields."""
    return {
        f"{key}/{type(gap).__name__}/{name}": np.array(value)
        for key, gap in gaps.items()
        for name, value in vars(gap).items()
    }


def gaps_from_arrays(arrays: Arrays) -> Gaps:
    """Return the gaps that `gaps_to_arrays` has written."""
    fields: dict[tuple[str, str], dict[str, Any]] = {}
    for path, array in arrays.items():
        key, kind, name = path.rsplit("/", 2)
        fields.setdefault((key, kind), {})[name] = array.item()
    return {key: getattr(metrics, kind)(**values) for (key, kind), values in fields.items()}


def compare_answers(task: Task, case_set: CaseSet, rounded: CaseSet, ends: Sequence[int] = ()) -> Gaps:
    """Measure how far rounded answers are from PyTorch's own; the ends of some texts are a context's."""
    gaps: Gaps = {}
    for measure in task.list_measures(case_set):
        seen = list_seen(case_set, rounded, measure)
        if measure.kind == "logits":
            logits = {text: rounded.answers["logits"][text].take_last(CONTEXT_ROWS) for text in ends}
            seen += [Seen(text, {"logits": known}) for text, known in logits.items()]
        if seen:
            gaps[find_key(measure)] = measure_gap(case_set, seen, measure, task.mean_over)
    return gaps


def list_seen(case_set: CaseSet, rounded: CaseSet, measure: Measure) -> list[Seen]:
    """Return the rounded answers that a measure applies to: not to texts that only support other cases."""
    measures: dict[int, set[tuple[str, str]]] = {}
    for case in case_set.cases:
        for row in case.rows:
            measures.setdefault(row.text, set()).update((each.kind, each.prefix) for each in case.measures)
    wanted = (measure.kind, measure.prefix)
    seen = []
    for text in case_set.answers.get(measure.outputs[0], {}):
        if wanted in measures.get(text, {wanted}):
            known = list_wanted(rounded, text)
            seen.append(Seen(text, {output: known[output] for output in measure.outputs if output in known}))
    return seen


def measure_gap(
    case_set: CaseSet, seen: Sequence[Seen], measure: Measure, mean_over: Sequence[int | None]
) -> Measured:
    """Measure how far an output is from the unrounded one.

    A case has some of the texts, and golden data some of their positions: a mean over all is at most the
    largest of any part, and so is the angle of a vector that has one value from each token.
    """
    if measure.kind == "columns":
        return measure_columns(seen, case_set)[0]
    if measure.kind == "passages":
        return measure_passages(seen, case_set)
    gap = measure_values(seen, case_set, measure)
    if not mean_over or not (isinstance(gap, Metrics | LabelMetrics) or measure.kind == "scores"):
        return gap
    parts = [part for one in seen for part in list_parts(one, mean_over)]
    alone = [measure_values([part], case_set, measure) for part in parts]
    if isinstance(gap, Metrics | ClassMetrics):
        divergences = [part.mean_kl for part in alone if isinstance(part, Metrics | ClassMetrics)]
        gap = replace(gap, mean_kl=max(divergences))
    if isinstance(gap, LabelMetrics):
        real = list_first_texts(case_set)
        of_texts = measure_values([one for one in seen if one.text in real], case_set, measure)
        assert isinstance(of_texts, LabelMetrics)
        return replace(gap, label_changes=of_texts.label_changes, rows=of_texts.rows)
    if isinstance(gap, VectorMetrics):
        vectors = [part for part in alone if isinstance(part, VectorMetrics)]
        error = max(part.max_error for part in vectors)
        return replace(gap, max_error=error, cosine_gap=max(part.cosine_gap for part in vectors))
    return gap


def list_parts(one: Seen, counts: Sequence[int | None]) -> list[Seen]:
    """Return single texts, with as many of their places as are counted together."""
    return [
        one
        if most is None
        else one._replace(values={output: known.thin(most) for output, known in one.values.items()})
        for most in counts
    ]


def list_first_texts(case_set: CaseSet) -> set[int]:
    """Return the texts of the first case and of those with the same name: of an encoder, the real ones."""
    first = case_set.cases[0].name
    return {row.text for case in case_set.cases if case.name == first for row in case.rows}


def find_key(measure: Measure) -> str:
    """Return the key of a measure's gap."""
    return measure.prefix or KEYS.get(measure.kind, "")
