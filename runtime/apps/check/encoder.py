"""Runs an encoder's cases through the runtime's own batching, and compares its results with PyTorch's.

R chosen positions
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...backends.backend import Array
from ...bundle.manifest import Artifact, TensorSpec
from ...encode.encoder import Encoder
from ...text.long_text import Piece
from .case import Case, CaseSet, Encoding, Known, Location, Measure, Text
from .judge import Limits, Seen, compare_known
from .metrics import ClassMetrics, LabelMetrics, Metrics, ValueMetrics, VectorMetrics
from .outcome import Outcome

DISTRIBUTIONS = {"masked_lm", "next_sentence", "sequence_classification", "token_classification"}
ONE_LABEL = "single_label_classification"  # the problem type of heads that have none in a config.json
INDEPENDENT = "multi_label_classification"


@dataclass(frozen=True)
class EncoderEngine:
    """An encoder in the runtime's own batching."""

    encoder: Encoder
    encoding: ClassVar[Encoding | None] = None

    @property
    def artifacts(self) -> tuple[Artifact]:
        return (self.encoder.artifact,)

    def run(self, case_set: CaseSet, case: Case) -> Iterator[Seen]:
        return run(self.encoder, case_set, case)

    def compare(self, case_set: CaseSet, cases: Sequence[Case], limits: Limits) -> Outcome:
        return compare_known(self.run, case_set, cases, limits)

    def close(self) -> None:
        self.encoder.close()


def run(encoder: Encoder, case_set: CaseSet, case: Case) -> Iterator[Seen]:
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
        yield see(case_set, Location(case, 0, row), outputs, specs)


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
    case_set: CaseSet, location: Location, outputs: Mapping[str, Array], specs: Sequence[TensorSpec]
) -> Seen:
    """Return what a graph gave of a row: results (R, ...) of tokens, and (...) of the whole text."""
    text = location.case.rows[location.row].text
    values = {}
    for spec in specs:
        known = case_set.answers.get(spec.name, {}).get(text)
        if known is not None and spec.name in outputs:
            array = outputs[spec.name]
            values[spec.name] = Known(known.positions, array if is_per_token(spec) else array[None])
    return Seen(text, values, location)


def list_measures(artifact: Artifact, problem_type: str, of_texts: bool) -> tuple[Measure, ...]:
    """Return what is measured of each output; means and shares count only `of_texts`.

    A mean's limit is what real texts may lose; of random tokens each result is judged alone.
    """
    return tuple(make_measure(spec, problem_type, of_texts) for spec in artifact.outputs)


def make_measure(spec: TensorSpec, problem_type: str, of_texts: bool) -> Measure:
    """Return how an output is measured: logits over classes or words as distributions, others as vectors."""
    prefix = f"{spec.name}."
    # One number from each token, of which all together are one vector.
    if spec.axis_names()[-1] == "tokens" or (is_per_token(spec) and spec.axes[-1] == 1):
        return Measure("scores", (spec.name,), VectorMetrics.LIMITED, prefix)
    if spec.role not in DISTRIBUTIONS:
        counts = of_texts and not is_per_token(spec)
        return Measure("vectors", (spec.name,), VectorMetrics.LIMITED, prefix, counts)
    if spec.role == "masked_lm":
        return Measure("logits", (spec.name,), Metrics.LIMITED, prefix)
    if spec.role == "sequence_classification":
        if problem_type == "regression":
            return Measure("values", (spec.name,), ValueMetrics.LIMITED, prefix)
        if problem_type == INDEPENDENT or spec.axis_names()[-1] == 1:  # no softmax of one
            return Measure("flags", (spec.name,), LabelMetrics.LIMITED, prefix, of_texts)
    return Measure("labels", (spec.name,), ClassMetrics.LIMITED, prefix, of_texts)


def is_per_token(spec: TensorSpec) -> bool:
    """Tell whether an output has a result for each token."""
    return bool({"tokens", "rows"} & set(spec.axis_names()))
