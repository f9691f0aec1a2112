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
from .cases import Case, Skipped, longest, too_long
from .evenly import evenly
from .files import Arrays

Outputs: TypeAlias = dict[str, Array]  # by the name of the graph's output

MAX_BATCH = 8  # of the padded case, or the graph's largest
GOLDEN_POSITIONS = 3
DISTRIBUTIONS = {"masked_lm", "next_sentence", "sequence_classification", "token_classification"}


@dataclass(frozen=True)
class Sample:
    """A sequence, and what PyTorch makes of it alone, without padding.

    Attributes:
        piece: the sequence.
        positions: of the tokens whose results are known.
        outputs: by output name; of a result per token (R, ...), the chosen positions only.
    """

    piece: Piece
    positions: tuple[int, ...]
    outputs: Outputs

    def __len__(self) -> int:
        return len(self.piece)

    def thin(self, per_token: Iterable[str]) -> Sample:
        """Return the sample with `GOLDEN_POSITIONS` of the positions, the first and last among them."""
        count = len(self.positions)
        keep = list(evenly(count, GOLDEN_POSITIONS))
        thin = {name: self.outputs[name][keep] for name in per_token}
        return Sample(self.piece, tuple(self.positions[i] for i in keep), self.outputs | thin)


@dataclass(frozen=True)
class Golden:
    """What every engine must reproduce.

    Attributes:
        samples: texts, a pair; then a single token, and a full sequence.
        per_token: names of the outputs that have a result per token.
    """

    samples: tuple[Sample, ...]
    per_token: tuple[str, ...]


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
    """Return the golden data that `to_arrays` stored.

    Raises:
        KeyError: an array is missing.
    """
    samples = []
    for i in range(sum(name.endswith(".ids") for name in arrays)):
        ids, segments, positions = (
            [int(number) for number in arrays[f"sample.{i}.{what}"]]
            for what in ("ids", "segments", "positions")
        )
        stem = f"sample.{i}.output."
        outputs = {name.removeprefix(stem): a for name, a in arrays.items() if name.startswith(stem)}
        samples.append(Sample(Piece(ids, segments, range(0), None), tuple(positions), outputs))
    return Golden(tuple(samples), tuple(str(name) for name in arrays["per_token"]))


def cases(encoder: Encoder, golden: Golden, limits: Mapping[str, float]) -> dict[str, Case]:
    """Return what is compared, by name, as far as the encoder takes so many tokens."""
    *texts, single, full = golden.samples
    room = longest(encoder.artifact)
    texts = [sample for sample in texts if len(sample) <= room]
    batch = [*texts, single][-min(MAX_BATCH, encoder.max_batch) :]

    def one_by_one() -> Outcome:
        return compare_outputs([run_batch(encoder, [s])[0] for s in texts], texts, encoder.artifact, limits)

    found = {"one by one": one_by_one} if texts else {}
    found[name_batch(batch)] = batch_case(encoder, batch, limits)
    found["1 token"] = batch_case(encoder, [single], limits)
    if len(full) <= room:
        found[f"{len(full)} tokens"] = batch_case(encoder, [full], limits)
    return found


def find_skipped(artifact: Artifact, golden: Golden) -> list[Skipped]:
    """Return what `cases` leaves out."""
    *texts, _, full = golden.samples
    room = longest(artifact)
    found = []
    if long := [len(sample) for sample in texts if len(sample) > room]:
        found.append(too_long(artifact, f"{len(long)} of {len(texts)} texts", max(long)))
    if len(full) > room:
        found.append(too_long(artifact, "a full sequence", len(full)))
    return found


def name_batch(samples: Sequence[Sample]) -> str:
    return f"batch of {len(samples)}, padded"


def batch_case(encoder: Encoder, samples: Sequence[Sample], limits: Mapping[str, float]) -> Case:
    """Return the case of all samples as one padded batch."""
    return lambda: compare_outputs(run_batch(encoder, samples), samples, encoder.artifact, limits)


def run_batch(encoder: Encoder, samples: Sequence[Sample]) -> list[Outputs]:
    """Return the outputs of sequences that run together; of results per token, the known positions."""
    specs = encoder.artifact.outputs
    positions = [list(sample.positions) for sample in samples]
    results = encoder.batch([s.piece for s in samples], [spec.role for spec in specs], positions)
    return [
        {
            spec.name: array[known] if "tokens" in spec.axis_names() else array
            for spec, array in zip(specs, arrays, strict=True)
        }
        for arrays, known in zip(results, positions, strict=True)
    ]


def compare_outputs(
    got: Sequence[Outputs],
    samples: Sequence[Sample],
    artifact: Artifact,
    limits: Mapping[str, float],
    failures: Sequence[str] = (),
) -> Outcome:
    """Return the outcome of every output of `samples`.

    Args:
        failures: other failures.
    """
    metrics: dict[str, Any] = {}
    wrong = list(failures)
    for name, measured in measure_all(got, [s.outputs for s in samples], artifact.outputs).items():
        own = {metric: limits[f"{name}.{metric}"] for metric in measured.LIMITED}
        wrong += [f"{name}: {failure}" for failure in judge(measured, own)]
        metrics |= {f"{name}.{key}": value for key, value in measured.to_json().items()}
    return Outcome(metrics, limits, tuple(wrong))


def measure_all(
    got: Sequence[Outputs], want: Sequence[Outputs], specs: Sequence[TensorSpec]
) -> dict[str, Metrics | VectorMetrics]:
    """Return the metrics of each output over all sequences."""
    found: dict[str, Metrics | VectorMetrics] = {}
    for spec in specs:
        sides = [[outputs[spec.name] for outputs in side] for side in (got, want)]
        if is_vector_of_tokens(spec):
            a, b = (np.concatenate(arrays)[None] for arrays in sides)
            found[spec.name] = measure_vectors(a, b, least_scale=1.0)
            continue
        a, b = (np.concatenate([np.atleast_2d(array) for array in arrays]) for arrays in sides)
        found[spec.name] = (
            measure(a, b)
            if metrics_of(spec) is Metrics
            else measure_vectors(a, b, of_texts=not is_per_token(spec))
        )
    return found


def metrics_of(spec: TensorSpec) -> type[Metrics] | type[VectorMetrics]:
    """Return how to compare an output: logits over classes or words as distributions, others as vectors."""
    return Metrics if spec.role in DISTRIBUTIONS else VectorMetrics


def is_vector_of_tokens(spec: TensorSpec) -> bool:
    """Tell whether it has one number from each token: a logit, of which all together are one vector."""
    return spec.axis_names()[-1] == "tokens"


def is_per_token(spec: TensorSpec) -> bool:
    return bool({"tokens", "rows"} & set(spec.axis_names()))
