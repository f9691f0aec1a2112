"""An encoder's golden data, and the runtime's own batches compared with it.

T tokens, R chosen positions, E hidden size
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ...backends.backend import Array
from ...bundle.manifest import Artifact, TensorSpec
from ...encode.encoder import Encoder
from ...text.long_text import Piece
from ..metrics import Metrics, Outcome, VectorMetrics, judge, measure, measure_vectors
from .cases import Case, Skipped, find_room, skip_too_long
from .files import Arrays, choose_evenly

Outputs: TypeAlias = dict[str, Array]  # by the name of the graph's output

MAX_BATCH = 8  # of the padded case, or the graph's largest
GOLDEN_POSITIONS = 3
DISTRIBUTIONS = {"masked_lm", "next_sentence", "sequence_classification", "token_classification"}


@dataclass(frozen=True)
class Sample:
    """A sequence, and what PyTorch makes of it alone, without padding."""

    piece: Piece
    positions: tuple[int, ...]  # of the tokens whose results are known
    outputs: Outputs  # of a result per token (R, ...), the chosen positions only

    def __len__(self) -> int:
        return len(self.piece)

    def thin(self, per_token: Iterable[str]) -> Sample:
        """Return the sample with `GOLDEN_POSITIONS` of the positions, the first and last among them."""
        keep = list(choose_evenly(len(self.positions), GOLDEN_POSITIONS))
        thin = {name: self.outputs[name][keep] for name in per_token}
        return Sample(self.piece, tuple(self.positions[i] for i in keep), self.outputs | thin)


@dataclass(frozen=True)
class Golden:
    """What every engine must reproduce."""

    samples: tuple[Sample, ...]  # texts, a pair; then a single token, and a full sequence
    per_token: tuple[str, ...]  # names of the outputs that have a result per token


def to_arrays(golden: Golden) -> dict[str, Array]:
    """Return sequences and some of PyTorch's results, as golden data stores them."""
    arrays: dict[str, Array] = {"per_token": np.array(golden.per_token)}
    for i, sample in enumerate(golden.samples):
        thin = sample.thin(golden.per_token)
        arrays |= {
            f"sample.{i}.ids": np.array(thin.piece.ids),
            f"sample.{i}.segments": np.array(thin.piece.segments),
            f"sample.{i}.positions": np.array(thin.positions),
        }
        arrays |= {f"sample.{i}.output.{name}": array for name, array in thin.outputs.items()}
    return arrays


def from_arrays(arrays: Arrays) -> Golden:
    """Return the golden data that `to_arrays` stored; a KeyError names an array that is missing."""
    samples = []
    for i in range(sum(name.endswith(".ids") for name in arrays)):
        ids = arrays[f"sample.{i}.ids"].tolist()
        segments = arrays[f"sample.{i}.segments"].tolist()
        positions = tuple(arrays[f"sample.{i}.positions"].tolist())
        stem = f"sample.{i}.output."
        outputs = {name.removeprefix(stem): a for name, a in arrays.items() if name.startswith(stem)}
        samples.append(Sample(Piece(ids, segments, range(0), None), positions, outputs))
    return Golden(tuple(samples), tuple(str(name) for name in arrays["per_token"]))


def make_cases(encoder: Encoder, golden: Golden, limits: Mapping[str, float]) -> dict[str, Case]:
    """Return what is compared, by name, as far as the encoder takes so many tokens."""
    *texts, single, full = golden.samples
    room = find_room(encoder.artifact)
    texts = [sample for sample in texts if len(sample) <= room]
    batch = [*texts, single][-min(MAX_BATCH, encoder.max_batch) :]

    def compare_one_by_one() -> Outcome:
        return compare_outputs([run_batch(encoder, [s])[0] for s in texts], texts, encoder.artifact, limits)

    cases = {"one by one": compare_one_by_one} if texts else {}
    cases[name_batch(batch)] = make_batch_case(encoder, batch, limits)
    cases["1 token"] = make_batch_case(encoder, [single], limits)
    if len(full) <= room:
        cases[f"{len(full)} tokens"] = make_batch_case(encoder, [full], limits)
    return cases


def find_skipped(artifact: Artifact, golden: Golden) -> list[Skipped]:
    """Return what `make_cases` leaves out."""
    *texts, _, full = golden.samples
    room = find_room(artifact)
    skipped = []
    if long := [len(sample) for sample in texts if len(sample) > room]:
        skipped.append(skip_too_long(artifact, f"{len(long)} of {len(texts)} texts", max(long)))
    if len(full) > room:
        skipped.append(skip_too_long(artifact, "a full sequence", len(full)))
    return skipped


def name_batch(samples: Sequence[Sample]) -> str:
    return f"batch of {len(samples)}, padded"


def make_batch_case(encoder: Encoder, samples: Sequence[Sample], limits: Mapping[str, float]) -> Case:
    """Return the case of all samples as one padded batch."""
    return lambda: compare_outputs(run_batch(encoder, samples), samples, encoder.artifact, limits)


def run_batch(encoder: Encoder, samples: Sequence[Sample]) -> list[Outputs]:
    """Return the outputs of sequences that run together; of results per token, the known positions."""
    specs = encoder.artifact.outputs
    positions = [list(sample.positions) for sample in samples]
    results = encoder.run_batch([s.piece for s in samples], [spec.role for spec in specs], positions)
    return [
        {
            spec.name: array[known] if "tokens" in spec.axis_names() else array
            for spec, array in zip(specs, arrays, strict=True)
        }
        for arrays, known in zip(results, positions, strict=True)
    ]


def compare_outputs(
    got: Sequence[Outputs], samples: Sequence[Sample], artifact: Artifact, limits: Mapping[str, float]
) -> Outcome:
    """Return the outcome of every output of `samples`."""
    metrics: dict[str, Any] = {}
    failures: list[str] = []
    for name, measured in measure_all(got, [s.outputs for s in samples], artifact.outputs).items():
        own = {metric: limits[f"{name}.{metric}"] for metric in measured.LIMITED}
        failures += [f"{name}: {failure}" for failure in judge(measured, own)]
        metrics |= {f"{name}.{key}": value for key, value in measured.to_json().items()}
    return Outcome(metrics, limits, tuple(failures))


def measure_all(
    got: Sequence[Outputs], want: Sequence[Outputs], specs: Sequence[TensorSpec]
) -> dict[str, Metrics | VectorMetrics]:
    """Return the metrics of each output over all sequences."""
    metrics: dict[str, Metrics | VectorMetrics] = {}
    for spec in specs:
        sides = [[outputs[spec.name] for outputs in side] for side in (got, want)]
        if is_vector_of_tokens(spec):
            a, b = (np.concatenate(arrays)[None] for arrays in sides)
            metrics[spec.name] = measure_vectors(a, b, least_scale=1.0)
            continue
        a, b = (np.concatenate([np.atleast_2d(array) for array in arrays]) for arrays in sides)
        if choose_metrics(spec) is Metrics:
            metrics[spec.name] = measure(a, b)
        else:
            metrics[spec.name] = measure_vectors(a, b, of_texts=not is_per_token(spec))
    return metrics


def choose_metrics(spec: TensorSpec) -> type[Metrics] | type[VectorMetrics]:
    """Return how to compare an output: logits over classes or words as distributions, others as vectors."""
    return Metrics if spec.role in DISTRIBUTIONS else VectorMetrics


def is_vector_of_tokens(spec: TensorSpec) -> bool:
    """Tell whether it has one number from each token: a logit, of which all together are one vector."""
    return spec.axis_names()[-1] == "tokens"


def is_per_token(spec: TensorSpec) -> bool:
    return bool({"tokens", "rows"} & set(spec.axis_names()))
