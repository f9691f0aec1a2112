"""Runs a decoder through the runtime's own loop and compares every logit with PyTorch's.

V vocabulary
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.cases import Case
from ...runtime.apps.check.decoders import Context, fill_context, make_cases
from ...runtime.apps.check.draws import PREFIX as DRAWN
from ...runtime.apps.check.files import Arrays
from ...runtime.apps.check.metrics import (
    DrawMetrics,
    Metrics,
    Outcome,
    Spot,
    TextMetrics,
    judge_outcome,
    measure,
)
from ...runtime.apps.check.places import COUNTED, ENOUGH
from ...runtime.backends.backend import Program
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.decoder import Decoder, pad
from ..execution.trial import Step, Trial, count_positions
from ..limits import Gaps
from ..precisions import PRECISIONS
from ..reference.decoder_samples import Expectation, open_plain_tokenizer, to_arrays
from ..reference.passages import measure_text, read_passages
from .draws import find_text, make_draw_trial
from .examiner import Examiner, Limited, Limits, OpenProgram

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel
    from ..reference.rounding import Rounding

log = logging.getLogger("planforge")

WHOLE_TEXTS = 3  # passages of a whole trial
TRIAL_TOKENS = (24, 13)  # at most, of the two texts of a trial


@dataclass(frozen=True)
class DecoderExaminer(Examiner[Decoder]):
    """A decoder's graphs beside the logits that the model computes."""

    expected: Expectation

    def collect_golden(self) -> Arrays:
        return to_arrays(self.expected)

    def measure_gaps(self, model: ReferenceModel, rounding: Rounding) -> Gaps:
        from ..reference.decoder import make_reference

        expected = self.expected
        reference = make_reference(model)
        if rounding.weights and not rounding.cache_scales:
            # Rounded weights lose as much at any position: the context would only take as long as all else.
            expected = replace(expected, context=Context())
        elif rounding.dtype is not None and expected.left_out and self.ends_like_passages():
            return reference.measure_gaps(expected.thin_for_gap(), rounding, ends=True)
        return reference.measure_gaps(expected, rounding)

    def ends_like_passages(self) -> bool:
        """Tell whether so little of the context is read that the end of real text stands for its end."""
        read = len(self.expected.context.tokens)
        return read <= 2 * max((len(passage.tokens) for passage in self.expected.passages), default=0)

    def thin(self, texts: int) -> DecoderExaminer:
        return replace(self, expected=self.expected.thin(texts))

    def run_calibration_texts(self, model: ReferenceModel) -> None:
        from ..reference.decoder import make_reference

        for tokens in self.expected.texts:
            make_reference(model).compute_logits(tokens, slice(None))

    def list_limited(self, gaps: Gaps) -> Iterator[Limited]:
        yield "", gaps.get(""), Metrics.LIMITED
        yield "", gaps.get("text"), TextMetrics.LIMITED
        yield DRAWN, gaps.get(DRAWN), DrawMetrics.LIMITED

    def open(self, artifact: Artifact, open_program: OpenProgram) -> Decoder:
        return Decoder(open_program(artifact), artifact)

    def list_cases(self, engine: Decoder, artifact: Artifact, limits: Limits) -> dict[str, Case]:
        compared = make_cases(engine, self.expected, limits, open_plain_tokenizer(self.bundle))
        if self.expected.passages and "text_kl" in limits:
            compared["real text"] = lambda: self.compare_passages(engine, limits)
        return compared

    def compare_passages(self, engine: Decoder, limits: Limits) -> Outcome:
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

    def list_slow_cases(self, engine: Decoder, artifact: Artifact, limits: Limits) -> dict[str, Case]:
        sample = self.expected.samples[0]

        def compare_every_position() -> Outcome:
            ids = np.array([[*sample.prompt, *sample.continuation[:-1]]])
            rows = [len(sample.prompt) - 1 + step for step in sample.steps]
            got = engine.start(1, ids.size).step(ids, np.ones_like(ids, bool), rows)
            return judge_outcome(measure(got, sample.logits), limits)

        def compare_full_context() -> Outcome:
            got = fill_context(engine, self.expected)[0]
            return judge_outcome(measure(got, self.expected.context_logits), limits)

        cases: dict[str, Case] = {"prefill of every position": compare_every_position}
        return cases | ({"full context": compare_full_context} if self.expected.context else {})

    def make_trial(self, artifact: Artifact, whole: bool = False) -> Trial:
        """Return a trial of two texts of unequal length as a padded batch, then a token for each on top."""
        texts = self.choose_trial_texts(whole)
        prompts = [text[:-1] for text in texts]
        last = [text[-1] for text in texts]
        prefill = count_positions(pad(prompts, artifact.padding_side)[1])
        decode = np.array([[len(prompt)] for prompt in prompts])

        def drive(program: Program) -> None:
            run = Decoder(program, artifact).start(len(texts), max(map(len, texts)))
            run.prefill(prompts)
            run.decode(last)

        steps = (Step("prefill", prefill), Step("decode", decode))
        return Trial(drive, steps, tuple(partial(read_text, text) for text in texts))

    def make_spot_trial(self, artifact: Artifact, spot: Spot) -> Trial | None:
        draws = self.expected.draws
        assert draws is not None  # nothing else has spots
        reading = partial(read_context, find_text(draws, spot, artifact))
        return make_draw_trial(
            artifact, draws, spot, reading, lambda program: (Decoder(program, artifact), None)
        )

    def choose_trial_texts(self, whole: bool) -> list[list[int]]:
        """Return the tokens of a trial's texts."""
        if whole and self.expected.passages:
            return [list(passage.tokens) for passage in self.expected.passages[:WHOLE_TEXTS]]
        longest_first = sorted(self.expected.samples, key=lambda s: -len(s.prompt))
        return [
            [*sample.prompt, *sample.continuation][: length + 1]
            for sample, length in zip((longest_first[0], longest_first[-1]), TRIAL_TOKENS, strict=True)
        ]


def read_context(context: Context, model: ReferenceModel, rounding: Rounding | None) -> object:
    """Run PyTorch over a context; last over what follows that which is there more than once."""
    from ..reference.decoder import make_reference

    return make_reference(model, rounding).compute_context_logits(context, 1)


def read_text(text: Sequence[int], model: ReferenceModel, rounding: Rounding | None) -> object:
    """Run PyTorch over a text."""
    from ..reference.decoder import make_reference

    return make_reference(model, rounding).compute_logits(text, slice(None))
