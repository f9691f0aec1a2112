"""An encoder's golden data, and the runtime's own batches compared with it.

T tokens, R chosen positions, E hidden size
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ...backends.backend import Array
from ...bundle.manifest import Artifact, TensorSpec
from ...encode.encoder import Encoder
from ...text.long_text import Piece
from .cases import Case, Skipped, find_room, name_sizes, skip_batches, skip_too_long
from .files import Arrays, choose_evenly
from .metrics import (
    LabelMetrics,
    Metrics,
    Outcome,
    Spot,
    VectorMetrics,
    judge,
    locate_failure,
    measure,
    measure_labels,
    measure_vectors,
)

Outputs: TypeAlias = dict[str, Array]  # by the name of the graph's output

MAX_BATCH = 8  # of the padded case, or the graph's largest
GOLDEN_POSITIONS = 3
DISTRIBUTIONS = {"masked_lm", "next_sentence", "sequence_classification", "token_classification"}
ONE_LABEL = "single_label_classification"  # the problem type of heads that have none in a config.json
INDEPENDENT = "multi_label_classification"


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
    # Sequences of any length, and padded batches of any size: the number in `pool` of what each row holds.
    # Earlier versions have none.
    drawn: tuple[Sample, ...] = field(default=(), kw_only=True)
    batches: tuple[tuple[int, ...], ...] = field(default=(), kw_only=True)
    seed: int = field(default=0, kw_only=True)  # that decided them
    # What the logits of a classifier mean. Earlier versions do not say.
    problem_type: str | None = field(default=None, kw_only=True)

    @property
    def pool(self) -> tuple[Sample, ...]:
        """The drawn sequences, a single token, and a full sequence."""
        return (*self.drawn, *self.samples[-2:])


def to_arrays(golden: Golden, whole: bool = False) -> dict[str, Array]:
    """Return sequences and some of PyTorch's results, as golden data stores them; all if `whole`."""
    arrays: dict[str, Array] = {"per_token": np.array(golden.per_token)}
    arrays |= {f"batch.{i}": np.array(rows) for i, rows in enumerate(golden.batches)}
    arrays["seed"] = np.array(golden.seed)
    if golden.problem_type is not None:
        arrays["problem_type"] = np.array(golden.problem_type)
    for kind, samples in (("sample", golden.samples), ("drawn", golden.drawn)):
        for i, sample in enumerate(samples):
            stored = sample if whole else sample.thin(golden.per_token)
            arrays |= {
                f"{kind}.{i}.ids": np.array(stored.piece.ids),
                f"{kind}.{i}.segments": np.array(stored.piece.segments),
                f"{kind}.{i}.positions": np.array(stored.positions),
            }
            arrays |= {f"{kind}.{i}.output.{name}": array for name, array in stored.outputs.items()}
    return arrays


def from_arrays(arrays: Arrays) -> Golden:
    """Return the golden data that `to_arrays` stored; a KeyError names an array that is missing."""
    batches = range(sum(name.startswith("batch.") for name in arrays))
    return Golden(
        read_samples(arrays, "sample"),
        tuple(str(name) for name in arrays["per_token"]),
        drawn=read_samples(arrays, "drawn"),
        batches=tuple(tuple(arrays[f"batch.{i}"].tolist()) for i in batches),
        seed=int(arrays.get("seed", 0)),
        problem_type=str(arrays["problem_type"]) if "problem_type" in arrays else None,
    )


def read_samples(arrays: Arrays, kind: str) -> tuple[Sample, ...]:
    """Return the samples whose arrays' names begin with `kind`."""
    samples = []
    for i in range(sum(name.startswith(f"{kind}.") and name.endswith(".ids") for name in arrays)):
        ids = arrays[f"{kind}.{i}.ids"].tolist()
        segments = arrays[f"{kind}.{i}.segments"].tolist()
        positions = tuple(arrays[f"{kind}.{i}.positions"].tolist())
        stem = f"{kind}.{i}.output."
        outputs = {name.removeprefix(stem): a for name, a in arrays.items() if name.startswith(stem)}
        samples.append(Sample(Piece(ids, segments, range(0), None), positions, outputs))
    return tuple(samples)


def make_cases(encoder: Encoder, golden: Golden, limits: Mapping[str, float]) -> dict[str, Case]:
    """Return what is compared, by name, as far as the encoder takes so many tokens."""
    *texts, single, full = golden.samples
    room = find_room(encoder.artifact)
    texts = [sample for sample in texts if len(sample) <= room]
    batch = [*texts, single][-min(MAX_BATCH, encoder.max_batch) :]
    kind = golden.problem_type

    def compare_one_by_one() -> Outcome:
        got = [run_batch(encoder, [sample])[0] for sample in texts]
        return compare_outputs(got, texts, encoder.artifact, limits, kind)

    cases = {"one by one": compare_one_by_one} if texts else {}
    cases[name_batch(batch)] = make_batch_case(encoder, batch, limits, kind)
    cases["1 token"] = make_batch_case(encoder, [single], limits, kind)
    if len(full) <= room:
        cases[f"{len(full)} tokens"] = make_batch_case(encoder, [full], limits, kind)
    if batches := list_batches(encoder.artifact, golden):
        sizes = sorted({len(rows) for rows in batches.values()})
        name = f"batches of {name_sizes(sizes)}, padded, drawn with seed {golden.seed}"
        cases[name] = make_drawn_case(encoder, batches, limits, kind)
    return cases


def list_batches(artifact: Artifact, golden: Golden) -> dict[int, list[Sample]]:
    """Return the drawn batches, by their numbers, as far as a graph takes so many rows and tokens."""
    rows = artifact.axis("batch")
    room = find_room(artifact)
    batches = {number: [golden.pool[i] for i in batch] for number, batch in enumerate(golden.batches)}
    return {
        number: batch
        for number, batch in batches.items()
        if rows.min <= len(batch) <= rows.max and max(map(len, batch)) <= room
    }


def make_drawn_case(
    encoder: Encoder,
    batches: Mapping[int, Sequence[Sample]],
    limits: Mapping[str, float],
    problem_type: str | None,
) -> Case:
    """Return the case of padded batches, of which the first row that is over its limits is told."""

    def compare(got: Sequence[Outputs], want: Sequence[Sample]) -> Outcome:
        # A mean's limit is what real texts may lose; of random tokens each result is judged alone.
        return compare_outputs(got, want, encoder.artifact, limits, problem_type, of_texts=False)

    def run() -> Outcome:
        got: list[Outputs] = []
        want: list[Sample] = []
        spot: Spot | None = None
        for number, batch in batches.items():
            outputs = run_batch(encoder, batch)
            got += outputs
            want += batch
            for row, (one, sample) in enumerate(zip(outputs, batch, strict=True)):
                if spot is None and compare([one], [sample]).failures:
                    spot = (number, 0, row)
        outcome = compare(got, want)
        if not outcome.failures or spot is None:
            return outcome
        number, _, row = spot
        lengths = ", ".join(str(len(sample)) for sample in batches[number])
        where = f"at first in row {row} of a batch of {len(batches[number])}, of {lengths} tokens"
        return locate_failure(outcome, where, spot)

    return run


def find_skipped(artifact: Artifact, golden: Golden) -> list[Skipped]:
    """Return what `make_cases` leaves out."""
    *texts, _, full = golden.samples
    room = find_room(artifact)
    skipped = []
    if long := [len(sample) for sample in texts if len(sample) > room]:
        skipped.append(skip_too_long(artifact, f"{len(long)} of {len(texts)} texts", max(long)))
    if len(full) > room:
        skipped.append(skip_too_long(artifact, "a full sequence", len(full)))
    left = [
        rows for number, rows in enumerate(golden.batches) if number not in list_batches(artifact, golden)
    ]
    if left:
        what = f"{len(left)} of {len(golden.batches)} drawn batches"
        longest = max(len(golden.pool[i]) for rows in left for i in rows)
        skipped.append(skip_batches(artifact, what, max(map(len, left)), longest))
    return skipped


def name_batch(samples: Sequence[Sample]) -> str:
    return f"batch of {len(samples)}, padded"


def make_batch_case(
    encoder: Encoder, samples: Sequence[Sample], limits: Mapping[str, float], problem_type: str | None
) -> Case:
    """Return the case of all samples as one padded batch."""
    return lambda: compare_outputs(
        run_batch(encoder, samples), samples, encoder.artifact, limits, problem_type
    )


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
    got: Sequence[Outputs],
    samples: Sequence[Sample],
    artifact: Artifact,
    limits: Mapping[str, float],
    problem_type: str | None = None,
    of_texts: bool = True,
) -> Outcome:
    """Return the outcome of every output of `samples`; means and shares count only `of_texts`."""
    metrics: dict[str, Any] = {}
    failures: list[str] = []
    want = [sample.outputs for sample in samples]
    for name, measured in measure_all(got, want, artifact.outputs, problem_type, of_texts).items():
        own = {metric: limits[f"{name}.{metric}"] for metric in measured.LIMITED}
        failures += [f"{name}: {failure}" for failure in judge(measured, own)]
        metrics |= {f"{name}.{key}": value for key, value in measured.to_json().items()}
    applied = {name: limit for name, limit in limits.items() if name in metrics}
    return Outcome(metrics, applied, tuple(failures))


def measure_all(
    got: Sequence[Outputs],
    want: Sequence[Outputs],
    specs: Sequence[TensorSpec],
    problem_type: str | None = None,
    of_texts: bool = True,
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
        kind = choose_metrics(spec, problem_type)
        if kind is LabelMetrics:
            independent = is_independent(spec, problem_type)
            metrics[spec.name] = measure_labels(a, b, independent=independent, of_texts=of_texts)
        elif kind is Metrics:
            metrics[spec.name] = measure(a, b)
        else:
            metrics[spec.name] = measure_vectors(a, b, of_texts=of_texts and not is_per_token(spec))
    return metrics


def choose_metrics(spec: TensorSpec, problem_type: str | None) -> type[Metrics] | type[VectorMetrics]:
    """Return how to compare an output: logits over classes or words as distributions, others as vectors."""
    if spec.role not in DISTRIBUTIONS:
        return VectorMetrics
    is_number = spec.role == "sequence_classification" and problem_type == "regression"
    has_labels = problem_type is not None and spec.role != "masked_lm" and not is_number
    return LabelMetrics if has_labels else Metrics


def is_independent(spec: TensorSpec, problem_type: str | None) -> bool:
    """Tell whether each label of a head has a probability of its own, as `classify` reads them."""
    multi = problem_type == INDEPENDENT or spec.axis_names()[-1] == 1  # no softmax of one
    return spec.role == "sequence_classification" and multi


def is_vector_of_tokens(spec: TensorSpec) -> bool:
    """Tell whether it has one number from each token: a logit, of which all together are one vector."""
    return spec.axis_names()[-1] == "tokens"


def is_per_token(spec: TensorSpec) -> bool:
    return bool({"tokens", "rows"} & set(spec.axis_names()))
