"""Runs a decoder through the runtime's own loop and compares every logit with PyTorch's.

V vocabulary
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.backends.backend import Program
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.decoder import Decoder, pad
from ...runtime.diagnostics.golden.cases import Case
from ...runtime.diagnostics.golden.decoders import cases, full_context
from ...runtime.diagnostics.golden.files import Arrays
from ...runtime.diagnostics.metrics import Outcome, judge_outcome, measure
from ...runtime.text.tokenizer import Tokenizer
from ..execution.trial import Reading, Step, Trial, positions_of
from ..limits import COUNTED, Gaps, limits_for
from ..precisions import PRECISIONS
from ..reference.decoder_samples import Expectation, expectation_of, from_arrays, to_arrays
from ..reference.passages import TextMetrics, measure_text, read_passages
from .examiner import Examiner, OpenProgram

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel
    from ..reference.rounding import Rounding

log = logging.getLogger("planforge")

WHOLE_TEXTS = 3  # passages of a whole trial
TRIAL_TOKENS = (24, 13)  # at most, of the two texts of a trial
ENOUGH = 500  # tokens of real text; what is counted in fewer says no more of an engine than of the text


@dataclass(frozen=True)
class DecoderExaminer(Examiner[Decoder]):
    """A decoder's graphs beside the logits that the model computes."""

    expected: Expectation

    @classmethod
    def from_model(cls, bundle: Bundle, model: ReferenceModel, texts: Sequence[str]) -> DecoderExaminer:
        from ..reference.decoder import reference_of

        manifest = bundle.manifest
        tuned_lengths = {artifact.axis("tokens").opt for artifact in manifest.artifacts}
        reference = reference_of(model)
        tokenizer = tokenizer_of(bundle)
        expected = expectation_of(reference, tokenizer, texts, manifest.max_length, tuned_lengths)
        return cls(bundle, expected)

    @classmethod
    def from_arrays(cls, bundle: Bundle, arrays: Arrays) -> DecoderExaminer:
        return cls(bundle, from_arrays(arrays))

    def to_arrays(self) -> Arrays:
        return to_arrays(self.expected)

    def measure_gaps(self, model: ReferenceModel, rounding: Rounding) -> Gaps:
        from ..reference.decoder import reference_of

        return reference_of(model).gaps(self.expected, rounding)

    def run_calibration_texts(self, model: ReferenceModel) -> None:
        from ..reference.decoder import reference_of

        for tokens in self.expected.texts:
            reference_of(model).logits(tokens, slice(None))

    def limits(self, precision: str, gaps: Gaps) -> dict[str, float]:
        of_logits = limits_for(precision, gaps.get(""))
        of_texts = limits_for(precision, gaps.get("text"), TextMetrics.LIMITED)
        return of_logits | of_texts

    def open(self, artifact: Artifact, open_program: OpenProgram) -> Decoder:
        return Decoder(open_program(artifact), artifact)

    def cases(self, engine: Decoder, artifact: Artifact, limits: Mapping[str, float]) -> dict[str, Case]:
        compared = cases(engine, self.expected, limits, tokenizer_of(self.bundle))
        if self.expected.passages and "text_kl" in limits:
            compared["real text, every token"] = lambda: self.compare_passages(engine, limits)
        return compared

    def compare_passages(self, engine: Decoder, limits: Mapping[str, float]) -> Outcome:
        """Compare every token of the passages."""
        passages = self.expected.passages
        metrics = measure_text(read_passages(engine, passages), passages)
        if metrics.rows >= ENOUGH:
            return judge_outcome(metrics, limits)
        if PRECISIONS[engine.artifact.precision].is_quantized:
            log.warning(
                "%s: %s are shown and not judged, for that takes %d tokens of real text, and there are %d",
                engine.artifact.id,
                " and ".join(COUNTED),
                ENOUGH,
                metrics.rows,
            )
        names = [name for name in metrics.LIMITED if name not in COUNTED]
        return judge_outcome(metrics, limits, names=names)

    def node_by_node_cases(
        self, engine: Decoder, artifact: Artifact, limits: Mapping[str, float]
    ) -> dict[str, Case]:
        sample = self.expected.samples[0]

        def compare_every_position() -> Outcome:
            ids = np.array([[*sample.prompt, *sample.continuation[:-1]]])
            rows = [len(sample.prompt) - 1 + step for step in sample.steps]
            got = engine.start(1, ids.size).step(ids, np.ones_like(ids, bool), rows)
            return judge_outcome(measure(got, sample.logits), limits)

        def compare_full_context() -> Outcome:
            got = full_context(engine, self.expected)[0]
            return judge_outcome(measure(got, self.expected.context_logits), limits)

        return {"prefill of every position": compare_every_position, "full context": compare_full_context}

    def trial(self, artifact: Artifact, whole: bool = False, open_other: OpenProgram | None = None) -> Trial:
        """Return a trial of two texts of unequal length as a padded batch, then a token for each on top."""
        texts = self.trial_texts(whole)
        prompts = [text[:-1] for text in texts]
        last = [text[-1] for text in texts]
        prefill = positions_of(pad(prompts, artifact.padding_side)[1])
        decode = np.array([[len(prompt)] for prompt in prompts])

        def drive(program: Program) -> None:
            run = Decoder(program, artifact).start(len(texts), max(map(len, texts)))
            run.prefill(prompts)
            run.decode(last)

        def reading(text: Sequence[int]) -> Reading:
            def read(model: ReferenceModel, rounding: Rounding | None) -> object:
                from ..reference.decoder import reference_of

                return reference_of(model, rounding).logits(text, slice(None))

            return read

        steps = (Step("prefill", prefill), Step("decode", decode))
        return Trial(drive, steps, tuple(reading(text) for text in texts))

    def trial_texts(self, whole: bool) -> list[list[int]]:
        """Return the tokens of a trial's texts."""
        if whole and self.expected.passages:
            return [list(passage.tokens) for passage in self.expected.passages[:WHOLE_TEXTS]]
        longest_first = sorted(self.expected.samples, key=lambda s: -len(s.prompt))
        return [
            [*sample.prompt, *sample.continuation][: length + 1]
            for sample, length in zip((longest_first[0], longest_first[-1]), TRIAL_TOKENS, strict=True)
        ]


def tokenizer_of(bundle: Bundle) -> Tokenizer:
    return Tokenizer.from_file(bundle.path(str(bundle.manifest.tokenizer["files"][0])))
