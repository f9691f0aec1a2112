"""Runs an encoder through the runtime's own batching and compares every output with PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.backends.backend import Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.defaults import EncoderDefaults
from ...runtime.bundle.manifest import Artifact, TensorSpec
from ...runtime.diagnostics.golden.cases import Case
from ...runtime.diagnostics.golden.encoders import (
    Sample,
    batch_case,
    cases,
    is_vector_of_tokens,
    measure_all,
    metrics_of,
    name_batch,
    run_batch,
    to_arrays,
)
from ...runtime.diagnostics.golden.files import Arrays
from ...runtime.diagnostics.metrics import Metrics, VectorMetrics
from ...runtime.encode.encoder import Encoder
from ...runtime.text.long_text import Piece
from ..execution.trial import Reading, Step, Trial, positions_of
from ..limits import Gaps, limits_for
from ..reference.encoder_samples import Expectation, compute_outputs, expect, from_arrays, run_model
from ..reference.fitted_head import HEAD, LinearHead
from ..reference.model import is_module
from .examiner import Examiner, OpenProgram

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel
    from ..reference.rounding import Rounding


@dataclass(frozen=True)
class EncoderExaminer(Examiner[Encoder]):
    """An encoder's graphs beside every output that the model computes."""

    expected: Expectation

    @classmethod
    def from_model(cls, bundle: Bundle, model: ReferenceModel, texts: Sequence[str]) -> EncoderExaminer:
        return cls(bundle, expect(model, bundle, texts))

    @classmethod
    def from_arrays(cls, bundle: Bundle, arrays: Arrays) -> EncoderExaminer:
        return cls(bundle, from_arrays(arrays))

    def to_arrays(self) -> Arrays:
        return to_arrays(self.expected)

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """The outputs, which all of the bundle's graphs share."""
        return self.bundle.manifest.artifacts[0].outputs

    @property
    def padding(self) -> int:
        """The token that pads short texts of a batch."""
        return encoder_defaults(self.bundle).tokens["pad"]

    def measure_gaps(self, model: ReferenceModel, rounding: Rounding) -> Gaps:
        assert is_module(model)
        samples = self.expected.samples
        specs = self.specs
        with rounding.apply(model):
            head = LinearHead.of(self.bundle)
            rounded_outputs = [compute_outputs(model, s.piece, s.positions, specs, head) for s in samples]
        gaps: Gaps = dict(measure_all(rounded_outputs, [sample.outputs for sample in samples], specs))
        # A case has some of the samples, and golden data some of their positions: a mean over all is at most
        # the largest of any part, and so is the angle of a vector that has one number from each token.
        parts = []
        for sample, outputs in zip(samples, rounded_outputs, strict=True):
            both = replace(sample, outputs=outputs), sample
            thin = (one.thin(self.expected.per_token) for one in both)
            parts += [measure_all([a.outputs], [b.outputs], specs) for a, b in (both, thin)]
        vectors = {spec.name for spec in specs if is_vector_of_tokens(spec)}
        for name, gap in gaps.items():

            def largest(metric: str, name: str = name) -> float:
                return max(float(getattr(part[name], metric)) for part in parts)

            if isinstance(gap, Metrics):
                gaps[name] = replace(gap, mean_kl=largest("mean_kl"))
            elif isinstance(gap, VectorMetrics) and name in vectors:
                gaps[name] = replace(gap, max_error=largest("max_error"), cosine_gap=largest("cosine_gap"))
        return gaps

    def run_calibration_texts(self, model: ReferenceModel) -> None:
        for piece in self.expected.texts:
            run_model(model, piece)

    def limits(self, precision: str, gaps: Gaps) -> dict[str, float]:
        return {
            f"{spec.name}.{metric}": limit
            for spec in self.specs
            for metric, limit in limits_for(precision, gaps.get(spec.name), metrics_of(spec).LIMITED).items()
        }

    def open(self, artifact: Artifact, open_program: OpenProgram) -> Encoder:
        return Encoder(open_program(artifact), artifact, self.padding)

    def cases(self, engine: Encoder, artifact: Artifact, limits: Mapping[str, float]) -> dict[str, Case]:
        return cases(engine, self.expected, limits)

    def node_by_node_cases(
        self, engine: Encoder, artifact: Artifact, limits: Mapping[str, float]
    ) -> dict[str, Case]:
        longest = self.expected.samples[-1]
        batch = self.trial_samples()
        return {
            name_batch(batch): batch_case(engine, batch, limits),
            f"{len(longest)} tokens": batch_case(engine, [longest], limits),
        }

    def trial(self, artifact: Artifact, whole: bool = False, open_other: OpenProgram | None = None) -> Trial:
        """Return a trial of two texts and a single token as a padded batch; a whole trial has all samples."""
        samples = list(self.expected.samples) if whole else self.trial_samples()

        def drive(program: Program) -> None:
            run_batch(Encoder(program, artifact, self.padding), samples)

        def reading(piece: Piece) -> Reading:
            return lambda model, rounding: run_model(model, piece)

        lengths = np.array([len(sample.piece) for sample in samples])
        step = Step("batch", positions_of(np.arange(lengths.max()) < lengths[:, None]))
        return Trial(drive, (step,), tuple(reading(sample.piece) for sample in samples))

    def trial_samples(self) -> list[Sample]:
        """Return two texts and a single token."""
        *texts, single, _ = self.expected.samples
        return [*texts[:2], single]


def encoder_defaults(bundle: Bundle) -> EncoderDefaults:
    assert bundle.manifest.encoder is not None
    return bundle.manifest.encoder


def add_fitted_head(
    old: EncoderExaminer, new: Bundle, limits: Mapping[str, Mapping[str, float]]
) -> tuple[EncoderExaminer, dict[str, dict[str, float]]]:
    """Return the examiner of a bundle with a fitted head, and its limits, from those without the head.

    The limits are the caps alone: without PyTorch the effect of rounding is not known.
    """
    head = LinearHead.of(new)
    assert head is not None
    artifact = old.bundle.manifest.artifacts[0]
    spec = new.manifest.artifacts[0].output(HEAD)
    encoder = old.open(artifact, lambda each: OrtCpuBackend().open(old.bundle, each))
    roles = [s.role for s in artifact.outputs if s.role.startswith("hidden.")]
    layers = sorted(roles, key=lambda role: int(role.removeprefix("hidden.")))
    roles = layers + [s.role for s in artifact.outputs if s.role == "sentence_embedding"]
    samples = []
    for sample in old.expected.samples:
        (arrays,) = encoder.batch([sample.piece], roles)
        states = dict(zip(roles, arrays, strict=True))
        last = int(layers[-1].removeprefix("hidden."))
        by_layer = [states.get(f"hidden.{layer}", np.empty(0)) for layer in range(last + 1)]
        logits = head.logits(by_layer, states.get("sentence_embedding"))
        samples.append(replace(sample, outputs={**sample.outputs, spec.name: logits}))
    encoder.close()
    names = metrics_of(spec).LIMITED
    with_caps = {}
    for precision, own in limits.items():
        caps = limits_for(precision, None, names)
        capped = {f"{spec.name}.{name}": cap for name, cap in caps.items()}
        with_caps[precision] = {**own, **capped}
    return EncoderExaminer(new, replace(old.expected, samples=tuple(samples))), with_caps
