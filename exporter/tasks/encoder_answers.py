"""PyTorch's answers to an encoder's cases, and how far rounding moves them.

T tokens, E hidden size
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ...runtime.apps.check.case import CaseSet, Known, Measure, Text, to_arrays
from ...runtime.apps.check.encoder import is_per_token, make_piece
from ...runtime.apps.check.files import fits
from ...runtime.apps.check.judge import Seen, measure_values
from ...runtime.apps.check.metrics import LabelMetrics, Measured, Metrics, VectorMetrics
from ...runtime.backends.backend import Array
from ...runtime.bundle.bundle import Bundle
from ...runtime.progress import PartCounter, Report, report_nothing
from ..limits import Gaps
from ..reference.fitted_head import HEAD, LinearHead
from ..reference.model import is_module

if TYPE_CHECKING:
    from torch import Tensor

    from ..reference.model import ReferenceModel
    from ..reference.rounding import Rounding

KEPT_POSITIONS = (3, 2, 1)  # of a text, in golden data; the first that fits its file


def answer(
    model: ReferenceModel, bundle: Bundle, case_set: CaseSet, report: Report = report_nothing
) -> CaseSet:
    """Return the set with PyTorch's answers, as the model is now: a caller may have rounded it."""
    specs = bundle.manifest.artifacts[0].outputs
    head = LinearHead.load(bundle)
    answers: dict[str, dict[int, Known]] = {spec.name: {} for spec in specs}
    numbers = sorted(case_set.answers[specs[0].name])
    parts = PartCounter(report, len(numbers))
    for number in numbers:
        states, results = run_model(model, case_set.texts[number])
        for spec in specs:
            wanted = case_set.answers[spec.name][number]
            array = find_output(spec.role, states, results, head)
            values = array[wanted.positions] if is_per_token(spec) else array[None]
            answers[spec.name][number] = Known(wanted.positions, values)
        parts.finish_one()
    return replace(case_set, answers=answers)


def run_model(model: ReferenceModel, text: Text) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return every layer's hidden states (1, T, E) of one sequence, and the heads' results."""
    import torch

    from ...models import PaddedAttention
    from ...models.encoder import Encoder

    if not isinstance(model, Encoder):
        from ..reference.transformers_reference import run_encoder

        return run_encoder(model, make_piece(text))
    with torch.no_grad():
        ids = torch.tensor([text.tokens])
        segments = torch.tensor([text.segments or (0,) * len(text.tokens)])
        mask = torch.ones_like(ids)
        kinds = segments if model.config.type_vocab_size else None
        states = model.hidden_states(ids, kinds, PaddedAttention(mask))
        return states, dict(model.head_outputs(states[-1], mask))


def find_output(
    role: str, states: list[Tensor], results: Mapping[str, Tensor], head: LinearHead | None
) -> Array:
    """Return what an output of this role is for one sequence; a fitted head is computed here."""
    kind, _, detail = role.partition(".")
    if head is not None and role == HEAD:
        vector = results.get("sentence_embedding")
        embedding = None if vector is None else vector[0].numpy()
        return head.compute_logits([state[0].numpy() for state in states], embedding)
    if kind == "hidden":
        tensor = states[int(detail)]
    elif kind == "question_answering":
        tensor = results[kind][..., ("start", "end").index(detail)]
    else:
        tensor = results[role]
    array: Array = tensor[0].numpy()
    return array


def measure_gaps(model: ReferenceModel, bundle: Bundle, case_set: CaseSet, rounding: Rounding) -> Gaps:
    """Measure how far the rounded model is from itself, by the beginning of limits' names."""
    assert is_module(model)
    with rounding.apply(model):
        rounded = answer(model, bundle, case_set)
    return {
        measure.prefix: measure_gap(case_set, rounded, measure) for measure in list_text_measures(case_set)
    }


def list_text_measures(case_set: CaseSet) -> tuple[Measure, ...]:
    """Return how the outputs of real text are measured, which comes first."""
    return case_set.cases[0].measures


def list_real_texts(case_set: CaseSet) -> set[int]:
    """Return the numbers of the texts that are real: of the first case and what is named so."""
    first = case_set.cases[0].name
    return {row.text for case in case_set.cases if case.name == first for row in case.rows}


def measure_gap(case_set: CaseSet, rounded: CaseSet, measure: Measure) -> Measured:
    """Measure how far an output is from itself unrounded.

    A case has some of the texts, and golden data some of their positions: a mean over all is at most the
    largest of any part, and so is the angle of a vector that has one number from each token.
    """
    (output,) = measure.outputs
    real = list_real_texts(case_set)
    seen = [Seen(text, 0, 0, text, {output: known}) for text, known in rounded.answers[output].items()]
    gap = measure_values(seen, case_set, measure)
    parts = [measure_values([part], case_set, measure) for part in list_parts(seen, output)]
    if isinstance(gap, Metrics):
        gap = replace(gap, mean_kl=max(part.mean_kl for part in parts if isinstance(part, Metrics)))
    if isinstance(gap, LabelMetrics):
        of_texts = measure_values([one for one in seen if one.text in real], case_set, measure)
        assert isinstance(of_texts, LabelMetrics)
        return replace(gap, label_changes=of_texts.label_changes, rows=of_texts.rows)
    if measure.kind == "scores":
        assert isinstance(gap, VectorMetrics)
        vectors = [part for part in parts if isinstance(part, VectorMetrics)]
        error = max(part.max_error for part in vectors)
        return replace(gap, max_error=error, cosine_gap=max(part.cosine_gap for part in vectors))
    return gap


def list_parts(seen: Iterable[Seen], output: str) -> list[Seen]:
    """Return each text alone, and as golden data keeps it."""
    parts = []
    for one in seen:
        known = one.values[output]
        parts += [one, one._replace(values={output: known.thin(KEPT_POSITIONS[0])})]
    return parts


def thin_for_file(case_set: CaseSet) -> CaseSet:
    """Return the set as golden data keeps it: with some of each text's positions, fewer where it is full."""
    thinned = case_set
    for most in KEPT_POSITIONS:
        answers = {
            output: {text: known.thin(most) for text, known in by_text.items()}
            for output, by_text in case_set.answers.items()
        }
        thinned = replace(case_set, answers=answers)
        if fits(to_arrays(thinned)):
            break
    return thinned
