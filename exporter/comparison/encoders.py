"""Runs an encoder through the runtime's own batching and compares every output with PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check import encoders as golden
from ...runtime.apps.check.cases import Case
from ...runtime.apps.check.files import Arrays, choose_evenly
from ...runtime.apps.check.metrics import LabelMetrics, Metrics, Spot, VectorMetrics
from ...runtime.backends.backend import Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact, TensorSpec
from ...runtime.encode.encoder import Encoder
from ...runtime.text.long_text import Piece
from ..execution.replay import PADDING, Replay, Step, count_positions
from ..limits import Gaps
from ..reference.encoder_samples import (
    Expectation,
    compute_outputs,
    read_problem_type,
    run_model,
    to_arrays,
)
from ..reference.fitted_head import HEAD, LinearHead
from ..reference.model import is_module
from .examiner import Examiner, Limited, Limits, OpenProgram

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel
    from ..reference.rounding import Rounding

COMPARED = 256  # tokens of a row in a replay, the first and last among them


@dataclass(frozen=True)
class EncoderExaminer(Examiner[Encoder]):
    """An encoder's graphs beside every output that the model computes."""

    expected: Expectation

    def collect_golden(self) -> Arrays:
        return to_arrays(self.expected)

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """The outputs, which all of the bundle's graphs share."""
        return self.bundle.manifest.artifacts[0].outputs

    @property
    def padding(self) -> int:
        """The token that pads short texts of a batch."""
        assert self.bundle.manifest.encoder is not None
        return self.bundle.manifest.encoder.tokens["pad"]

    def measure_gaps(self, model: ReferenceModel, rounding: Rounding) -> Gaps:
        assert is_module(model)
        samples = (*self.expected.samples, *self.expected.drawn)
        specs = self.specs
        kind = self.expected.problem_type
        with rounding.apply(model):
            head = LinearHead.load(self.bundle)
            rounded_outputs = [compute_outputs(model, s.piece, s.positions, specs, head) for s in samples]
        gaps: Gaps = dict(golden.measure_all(rounded_outputs, [s.outputs for s in samples], specs, kind))
        # A case has some of the samples, and golden data some of their positions: a mean over all is at most
        # the largest of any part, and so is the angle of a vector that has one number from each token.
        parts = []
        for sample, outputs in zip(samples, rounded_outputs, strict=True):
            both = replace(sample, outputs=outputs), sample
            thin = (one.thin(self.expected.per_token) for one in both)
            parts += [golden.measure_all([a.outputs], [b.outputs], specs, kind) for a, b in (both, thin)]
        vectors = {spec.name for spec in specs if golden.is_vector_of_tokens(spec)}
        count = max(1, len(self.expected.samples) - 2)  # behind the texts are a token and a full sequence
        of_texts = golden.measure_all(
            rounded_outputs[:count], [s.outputs for s in samples[:count]], specs, kind
        )

        def find_largest(name: str, metric: str) -> float:
            return max(float(getattr(part[name], metric)) for part in parts)

        for name, gap in gaps.items():
            if isinstance(gap, Metrics):
                gap = replace(gap, mean_kl=find_largest(name, "mean_kl"))
                texts = of_texts[name]
                if isinstance(gap, LabelMetrics) and isinstance(texts, LabelMetrics):
                    gap = replace(gap, label_changes=texts.label_changes, rows=texts.rows)
                gaps[name] = gap
            elif isinstance(gap, VectorMetrics) and name in vectors:
                error = find_largest(name, "max_error")
                gaps[name] = replace(gap, max_error=error, cosine_gap=find_largest(name, "cosine_gap"))
        return gaps

    def run_calibration_texts(self, model: ReferenceModel) -> None:
        for piece in self.expected.texts:
            run_model(model, piece)

    def list_limited(self, gaps: Gaps) -> Iterator[Limited]:
        for spec in self.specs:
            kind = golden.choose_metrics(spec, self.expected.problem_type)
            yield f"{spec.name}.", gaps.get(spec.name), kind.LIMITED

    def open(self, artifact: Artifact, open_program: OpenProgram) -> Encoder:
        return Encoder(open_program(artifact), artifact, self.padding)

    def list_cases(self, engine: Encoder, artifact: Artifact, limits: Limits) -> dict[str, Case]:
        return golden.make_cases(engine, self.expected, limits)

    def list_slow_cases(self, engine: Encoder, artifact: Artifact, limits: Limits) -> dict[str, Case]:
        longest = self.expected.samples[-1]
        batch = self.choose_replay_samples()
        kind = self.expected.problem_type
        return {
            golden.name_batch(batch): golden.make_batch_case(engine, batch, limits, kind),
            f"{len(longest)} tokens": golden.make_batch_case(engine, [longest], limits, kind),
        }

    def make_replay(self, artifact: Artifact, whole: bool = False) -> Replay:
        """Return a replay of two texts and a single token as a padded batch; a whole one has all samples."""
        samples = list(self.expected.samples) if whole else self.choose_replay_samples()

        def drive(program: Program) -> None:
            golden.run_batch(Encoder(program, artifact, self.padding), samples)

        def read(piece: Piece, model: ReferenceModel, rounding: Rounding | None) -> object:
            return run_model(model, piece)

        lengths = np.array([len(sample.piece) for sample in samples])
        step = Step("batch", count_positions(np.arange(lengths.max()) < lengths[:, None]))
        return Replay(drive, (step,), tuple(partial(read, sample.piece) for sample in samples))

    def make_spot_replay(self, artifact: Artifact, spot: Spot) -> Replay | None:
        number, _, row = spot
        samples = [self.expected.pool[i] for i in self.expected.batches[number]]
        piece = samples[row].piece

        def drive(program: Program) -> None:
            golden.run_batch(Encoder(program, artifact, self.padding), samples)

        def read(model: ReferenceModel, rounding: Rounding | None) -> object:
            return run_model(model, piece)

        positions = np.full((len(samples), max(map(len, samples))), PADDING)
        compared = list(choose_evenly(len(piece), COMPARED))
        positions[row, compared] = compared
        step = Step(f"batch of {len(samples)}", positions)
        return Replay(drive, (step,), tuple(read if i == row else None for i in range(len(samples))))

    def choose_replay_samples(self) -> list[golden.Sample]:
        """Return two texts and a single token."""
        *texts, single, _ = self.expected.samples
        return [*texts[:2], single]


def add_fitted_head(
    old: EncoderExaminer, new: Bundle, limits: Mapping[str, Limits]
) -> tuple[EncoderExaminer, dict[str, dict[str, float]]]:
    """Return the examiner of a bundle with a fitted head, and its limits, from those without the head.

    The head's limits are the caps alone: without PyTorch the effect of rounding is not known.
    """
    head = LinearHead.load(new)
    assert head is not None
    artifact = old.bundle.manifest.artifacts[0]
    spec = new.manifest.artifacts[0].output(HEAD)
    encoder = old.open(artifact, lambda each: OrtCpuBackend().open(old.bundle, each))
    roles = [s.role for s in artifact.outputs if s.role.startswith(("hidden.", "sentence_embedding"))]
    last = max(int(role.removeprefix("hidden.")) for role in roles if role.startswith("hidden."))

    def add_logits(sample: golden.Sample) -> golden.Sample:
        (arrays,) = encoder.run_batch([sample.piece], roles)
        states = dict(zip(roles, arrays, strict=True))
        by_layer = [states.get(f"hidden.{layer}", np.empty(0)) for layer in range(last + 1)]
        logits = head.compute_logits(by_layer, states.get("sentence_embedding"))
        return replace(sample, outputs={**sample.outputs, spec.name: logits})

    samples = tuple(map(add_logits, old.expected.samples))
    drawn = tuple(map(add_logits, old.expected.drawn))
    encoder.close()
    expected = replace(old.expected, samples=samples, drawn=drawn, problem_type=read_problem_type(new))
    examiner = EncoderExaminer(new, expected)
    return examiner, {name: {**examiner.choose_limits(name, {}), **own} for name, own in limits.items()}
