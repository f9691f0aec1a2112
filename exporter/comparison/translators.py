"""Runs an encoder-decoder through the runtime's own loop and compares every number with PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.backends.backend import Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.decoder import Decoder, pad
from ...runtime.diagnostics.golden.cases import Case
from ...runtime.diagnostics.golden.files import Arrays
from ...runtime.diagnostics.golden.translation_engine import Engine
from ...runtime.diagnostics.golden.translations import Sample, to_arrays
from ...runtime.diagnostics.golden.translators import (
    at_once_case,
    cross_case,
    decoder_cases,
    encoder_cases,
)
from ...runtime.diagnostics.metrics import Metrics, VectorMetrics, scale_of
from ...runtime.translate.source_encoder import SourceEncoder
from ...runtime.translate.tokenizers import open_tokenizers
from ..execution.trial import Reading, Step, Trial, positions_of
from ..limits import Gaps, limits_for
from ..reference.translation_samples import Expectation, expect, from_arrays
from .examiner import Examiner, OpenProgram

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel
    from ..reference.rounding import Rounding

TRIAL_TOKENS = (12, 7)  # at most, of the two targets of a trial


@dataclass(frozen=True)
class TranslationExaminer(Examiner[Engine]):
    """An encoder-decoder's graphs beside the keys, values, logits and beams that the model computes."""

    expected: Expectation

    @classmethod
    def from_model(cls, bundle: Bundle, model: ReferenceModel, texts: Sequence[str]) -> TranslationExaminer:
        return cls(bundle, expect(model, bundle, texts))

    @classmethod
    def from_arrays(cls, bundle: Bundle, arrays: Arrays) -> TranslationExaminer:
        return cls(bundle, from_arrays(arrays))

    def to_arrays(self) -> Arrays:
        return to_arrays(self.expected)

    @property
    def decoder_start(self) -> int:
        """The token that every target begins with."""
        defaults = self.bundle.manifest.generation
        assert defaults is not None and defaults.decoder_start is not None
        return defaults.decoder_start

    def measure_gaps(self, model: ReferenceModel, rounding: Rounding) -> Gaps:
        assert self.expected.reference is not None
        return self.expected.reference.gaps(self.expected.samples, rounding)

    def run_calibration_texts(self, model: ReferenceModel) -> None:
        """Run PyTorch over the sources to calibrate with, and over its translations of them."""
        reference = self.expected.reference
        assert reference is not None
        greedy = replace(self.expected.search, num_beams=1, n_best=1)
        for source in self.expected.texts:
            (best,) = reference.search(source, greedy)
            reference.results(source, best.token_ids)

    def limits(self, precision: str, gaps: Gaps) -> dict[str, float]:
        names_by_prefix = {
            "": Metrics.LIMITED,
            "cross.": VectorMetrics.LIMITED,
            "attention.": VectorMetrics.LIMITED,
        }
        limits = {
            f"{prefix}{name}": limit
            for prefix, names in names_by_prefix.items()
            for name, limit in limits_for(precision, gaps.get(prefix), names).items()
        }
        # A logit's error moves a token's log-probability by at most twice as much, and so their mean.
        scale = max(scale_of(sample.logits) for sample in self.expected.samples)
        limits["score_error"] = 2 * limits["max_error"] * scale
        return limits

    def open(self, artifact: Artifact, open_program: OpenProgram) -> Engine:
        """Open an encoder with the decoder that fits it best, or a decoder with the encoder."""

        def partner(graph: str) -> Artifact:
            if artifact.graph == graph:
                return artifact
            others = [other for other in self.bundle.manifest.artifacts if other.graph == graph]
            return max(
                others,
                key=lambda other: (other.precision == artifact.precision, other.dialect == artifact.dialect),
            )

        encoder = partner("encoder")
        decoder = partner("decoder")
        return Engine(
            SourceEncoder(open_program(encoder), encoder, decoder),
            Decoder(open_program(decoder), decoder),
            self.decoder_start,
            open_tokenizers(self.bundle),
        )

    def cases(self, engine: Engine, artifact: Artifact, limits: Mapping[str, float]) -> dict[str, Case]:
        """Return the cases of one of the two graphs; PyTorch scores targets that are not known."""
        if artifact.graph == "encoder":
            return encoder_cases(engine, self.expected, limits)
        reference = self.expected.reference

        def score(sample: Sample, target: tuple[int, ...]) -> float:
            assert reference is not None
            return reference.score(sample.source, target)

        return decoder_cases(engine, self.expected, limits, None if reference is None else score)

    def node_by_node_cases(
        self, engine: Engine, artifact: Artifact, limits: Mapping[str, float]
    ) -> dict[str, Case]:
        samples = [*self.expected.samples[:2], *self.expected.samples[-2:]]  # two texts, one token, the most
        make_case = cross_case if artifact.graph == "encoder" else at_once_case
        return {f"{len(samples)} sources": make_case(engine, samples, limits)}

    def trial(self, artifact: Artifact, whole: bool = False, open_other: OpenProgram | None = None) -> Trial:
        """Return a trial of two unequal, padded sources; for a decoder of their targets, then a token."""
        sources = [sample.source for sample in self.expected.samples]
        # With the start token a prompt is no longer than a full target.
        targets = [sample.target[:-1] for sample in self.expected.samples]
        if not whole:
            sources = sources[:2]
            targets = [target[:length] for target, length in zip(targets, TRIAL_TOKENS, strict=False)]
        prompts = [[self.decoder_start, *target[:-1]] for target in targets]

        def open_engine(program: Program) -> Engine:
            def open_program(other: Artifact) -> Program:
                if other == artifact:
                    return program
                return OrtCpuBackend().open(self.bundle, other) if open_other is None else open_other(other)

            return self.open(artifact, open_program)

        def encode(program: Program) -> None:
            open_engine(program).encoder.encode(sources)

        def decode(program: Program) -> None:
            run = open_engine(program).decoding(sources, 1, max(map(len, targets)) + 1)
            run.prefill(prompts)
            run.decode([target[-1] for target in targets])

        if artifact.graph == "encoder":
            steps = [Step("sources", positions_of(pad(sources, "right")[1]))]
            readings = [self.source_reading(source) for source in sources]
            return Trial(encode, tuple(steps), tuple(readings))
        prefill = positions_of(pad(prompts, artifact.padding_side)[1])
        last = np.array([[len(prompt)] for prompt in prompts])
        steps = [Step("prefill", prefill), Step("decode", last)]
        readings = [self.target_reading(*pair) for pair in zip(sources, targets, strict=True)]
        return Trial(decode, tuple(steps), tuple(readings))

    # No keys and values of a translator are int8, so a reading does without its rounding.

    def source_reading(self, source: Sequence[int]) -> Reading:
        """Return what runs PyTorch's encoder over a source."""

        def read(model: ReferenceModel, rounding: Rounding | None) -> object:
            from ..reference.translation import reference_of

            return reference_of(model, self.decoder_start).keys_values(source)

        return read

    def target_reading(self, source: Sequence[int], target: Sequence[int]) -> Reading:
        """Return what runs PyTorch over a source and a target."""

        def read(model: ReferenceModel, rounding: Rounding | None) -> object:
            from ..reference.translation import reference_of

            # The model is fed a target but for its last token, so there has to be one more.
            return reference_of(model, self.decoder_start).results(source, [*target, 0])

        return read
