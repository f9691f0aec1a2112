"""Runs an encoder's cases through the runtime's own batching, and compares its results with PyTorch's.

R chosen positions
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from ...backends.backend import Array
from ...bundle.manifest import Artifact, TensorSpec
from ...encode.encoder import Encoder
from ...text.long_text import Piece
from .case import Case, CaseSet, Kind, Known, Measure, Text
from .judge import Numbered, Seen, judge, list_comparisons
from .metrics import LabelMetrics, Metrics, Outcome, VectorMetrics

DISTRIBUTIONS = {"masked_lm", "next_sentence", "sequence_classification", "token_classification"}
ONE_LABEL = "single_label_classification"  # the problem type of heads that have none in a config.json
INDEPENDENT = "multi_label_classification"


def list_encoder_comparisons(
    encoder: Encoder, case_set: CaseSet, limits: Mapping[str, float]
) -> dict[str, Callable[[], Outcome]]:
    """Return what compares an encoder's graph with PyTorch, by name."""

    def compare(cases: Sequence[Numbered]) -> Outcome:
        seen = chain.from_iterable(run(encoder, case_set, *case) for case in cases)
        return judge(seen, case_set, cases[0][1].measures, limits)

    return list_comparisons(case_set, encoder.artifact, compare)


def run(encoder: Encoder, case_set: CaseSet, number: int, case: Case) -> Iterator[Seen]:
    """Yield what a graph gives at the wanted places of texts that it reads together."""
    specs = encoder.artifact.outputs
    texts = [case_set.texts[row.text] for row in case.rows]
    positions = [list_positions(case_set, row.text, specs) for row in case.rows]
    results = encoder.run_batch(
        [make_piece(text) for text in texts], [spec.role for spec in specs], positions
    )
    for row, (arrays, places) in enumerate(zip(results, positions, strict=True)):
        outputs = {
            spec.name: array[places] if "tokens" in spec.axis_names() else array
            for spec, array in zip(specs, arrays, strict=True)
        }
        yield see(case_set, number, case, row, outputs, specs)


def make_piece(text: Text) -> Piece:
    """Return a text as an encoder reads it."""
    return Piece(list(text.tokens), list(text.segments or (0,) * len(text.tokens)), range(0), None)


def list_positions(case_set: CaseSet, text: int, specs: Sequence[TensorSpec]) -> list[int]:
    """Return the positions of a text at which results of tokens are known."""
    for spec in specs:
        if is_per_token(spec) and (known := case_set.answers.get(spec.name, {}).get(text)):
            places: list[int] = known.positions.tolist()
            return places
    return []


def see(
    case_set: CaseSet,
    number: int,
    case: Case,
    row: int,
    outputs: Mapping[str, Array],
    specs: Sequence[TensorSpec],
) -> Seen:
    """Return what a graph gave of a row: results (R, ...) of tokens, and (...) of the whole text."""
    text = case.rows[row].text
    values = {}
    for spec in specs:
        known = case_set.answers.get(spec.name, {}).get(text)
        if known is not None and spec.name in outputs:
            array = outputs[spec.name]
            values[spec.name] = Known(known.positions, array if is_per_token(spec) else array[None])
    return Seen(number, 0, row, text, values)


def list_measures(artifact: Artifact, problem_type: str, of_texts: bool) -> tuple[Measure, ...]:
    """Return what is measured of each output; means and shares count only `of_texts`.

    A mean's limit is what real texts may lose; of random tokens each result is judged alone.
    """
    return tuple(make_measure(spec, problem_type, of_texts) for spec in artifact.outputs)


def make_measure(spec: TensorSpec, problem_type: str, of_texts: bool) -> Measure:
    """Return how an output is measured: logits over classes or words as distributions, others as vectors."""
    prefix = f"{spec.name}."
    if spec.axis_names()[-1] == "tokens":  # a logit from each token, of which all together are one vector
        return Measure("scores", (spec.name,), VectorMetrics.LIMITED, prefix)
    if spec.role not in DISTRIBUTIONS:
        counts = of_texts and not is_per_token(spec)
        return Measure("vectors", (spec.name,), VectorMetrics.LIMITED, prefix, counts)
    is_number = spec.role == "sequence_classification" and problem_type == "regression"
    if spec.role == "masked_lm" or is_number:
        return Measure("logits", (spec.name,), Metrics.LIMITED, prefix)
    has_one = problem_type == INDEPENDENT or spec.axis_names()[-1] == 1  # no softmax of one
    is_independent = spec.role == "sequence_classification" and has_one
    kind: Kind = "flags" if is_independent else "labels"
    return Measure(kind, (spec.name,), LabelMetrics.LIMITED, prefix, of_texts)


def is_per_token(spec: TensorSpec) -> bool:
    """Tell whether an output has a result for each token."""
    return bool({"tokens", "rows"} & set(spec.axis_names()))
