"""Runs an encoder-decoder through the runtime's own loop and compares every number with PyTorch's."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ...runtime.apps.check.cases import Case
from ...runtime.apps.check.draws import PREFIX as DRAWN
from ...runtime.apps.check.draws import STEPS, measure_error
from ...runtime.apps.check.files import Arrays
from ...runtime.apps.check.metrics import (
    DrawMetrics,
    Logits,
    Metrics,
    ScoreMetrics,
    Spot,
    VectorMetrics,
    measure_scale,
)
from ...runtime.apps.check.translation_engine import Engine
from ...runtime.apps.check.translations import Sample
from ...runtime.apps.check.translators import (
    SEARCH,
    list_searched,
    make_at_once_case,
    make_cross_case,
    make_decoder_cases,
    make_encoder_cases,
)
from ...runtime.backends.backend import Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.decoder import Decoder, pad
from ...runtime.translate.source_encoder import SourceEncoder
from ...runtime.translate.sources import open_tokenizers
from ..execution.replay import PADDING, Reading, Replay, Step, count_positions
from ..limits import CAPS, GAP_FACTOR, NOTHING_ACCEPTED, Accepted, Gaps
from ..reference.translation_samples import Expectation, to_arrays
from .draws import find_text, make_draw_replay
from .examiner import Examiner, Limited, Limits, OpenProgram

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel
    from ..reference.rounding import Rounding
    from ..reference.translation import Reference

REPLAY_TOKENS = (12, 7)  # at most, of the two targets of a replay


@dataclass(frozen=True)
class TranslationExaminer(Examiner[Engine]):
    """An encoder-decoder's graphs beside the keys, values, logits and beams that the model computes."""

    runs_model: ClassVar[bool] = True  # to score targets that an engine finds

    expected: Expectation

    def collect_golden(self) -> Arrays:
        return to_arrays(self.expected)

    @property
    def decoder_start(self) -> int:
        """The token that every target begins with."""
        defaults = self.bundle.manifest.generation
        assert defaults is not None and defaults.decoder_start is not None
        return defaults.decoder_start

    def measure_gaps(self, model: ReferenceModel, rounding: Rounding) -> Gaps:
        assert self.expected.reference is not None
        return self.expected.reference.measure_gaps(self.expected.samples, rounding, self.expected.draws)

    def run_calibration_texts(self, model: ReferenceModel) -> None:
        """Run PyTorch over the sources to calibrate with, and over its translations of them."""
        reference = self.expected.reference
        assert reference is not None
        greedy = replace(self.expected.search, num_beams=1, n_best=1)
        for source in self.expected.texts:
            (best,) = reference.search(source, greedy)
            reference.compute_results(source, best.token_ids)

    def list_limited(self, gaps: Gaps) -> Iterator[Limited]:
        yield "", gaps.get(""), Metrics.LIMITED
        for prefix in ("cross.", "attention."):
            yield prefix, gaps.get(prefix), VectorMetrics.LIMITED
        for prefix in (SEARCH, DRAWN):
            yield prefix, gaps.get(prefix), DrawMetrics.LIMITED

    def choose_limits(
        self, precision: str, gaps: Gaps, accepted: Accepted = NOTHING_ACCEPTED
    ) -> dict[str, float]:
        limits = super().choose_limits(precision, gaps, accepted)
        # A logit's error moves a token's log-probability by at most twice as much, and so their mean. That is
        # the most: errors of many tokens cancel, so what rounding does to the scores themselves is held to.
        scale = max(measure_scale(sample.logits) for sample in self.expected.samples)
        most = 2 * limits["max_error"] * scale
        own = gaps.get("score")
        if isinstance(own, ScoreMetrics):
            least = 2 * CAPS["fp32"]["max_error"] * scale
            most = max(least, min(most, GAP_FACTOR * own.score_error))
        return {**limits, "score_error": most}

    def name_losses(self, gaps: Gaps) -> dict[str, float]:
        own = gaps.get("score")
        score = {"score_error": own.score_error} if isinstance(own, ScoreMetrics) else {}
        return super().name_losses(gaps) | score

    def measure_failed_search(self, artifact: Artifact, rounding: Rounding) -> dict[str, float]:
        """Return what rounding does in PyTorch to the targets that a graph's own search finds.

        A search that leaves PyTorch's may come to targets at which the model is less sure.
        """
        reference = self.expected.reference
        assert reference is not None
        engine = self.open(artifact, lambda other: OrtCpuBackend().open(self.bundle, other))
        try:
            samples = list_searched(engine, self.expected)
            found = engine.search(samples, self.expected.search)
        finally:
            engine.close()
        searched = [
            (sample, replace(target, score=reference.score(sample.source, target.token_ids)))
            for sample, targets in zip(samples, found, strict=True)
            for target in targets
        ]
        return self.name_losses(reference.measure_rounded_searches(searched, rounding))

    def open(self, artifact: Artifact, open_program: OpenProgram) -> Engine:
        """Open an encoder with the decoder that fits it best, or a decoder with the encoder."""

        def find_partner(graph: str) -> Artifact:
            if artifact.graph == graph:
                return artifact
            others = [other for other in self.bundle.manifest.artifacts if other.graph == graph]
            return max(
                others, key=lambda a: (a.precision == artifact.precision, a.dialect == artifact.dialect)
            )

        encoder = find_partner("encoder")
        decoder = find_partner("decoder")
        return Engine(
            SourceEncoder(open_program(encoder), encoder, decoder),
            Decoder(open_program(decoder), decoder),
            self.decoder_start,
            open_tokenizers(self.bundle),
        )

    def list_cases(self, engine: Engine, artifact: Artifact, limits: Limits) -> dict[str, Case]:
        """Return the cases of one of the two graphs; PyTorch goes along with a search, if it is there."""
        if artifact.graph == "encoder":
            return make_encoder_cases(engine, self.expected, limits)
        reference = self.expected.reference
        if reference is None:
            return make_decoder_cases(engine, self.expected, limits, engine.score)

        def score(sample: Sample, target: tuple[int, ...]) -> float:
            return reference.score(sample.source, target)

        return make_decoder_cases(engine, self.expected, limits, score, partial(SearchFollower, reference))

    def list_slow_cases(self, engine: Engine, artifact: Artifact, limits: Limits) -> dict[str, Case]:
        samples = [*self.expected.samples[:2], *self.expected.samples[-2:]]  # two texts, one token, the most
        make_case = make_cross_case if artifact.graph == "encoder" else make_at_once_case
        return {f"{len(samples)} sources": make_case(engine, samples, limits)}

    def make_replay(self, artifact: Artifact, whole: bool = False) -> Replay:
        """Return a replay of two unequal, padded sources; for a decoder of their targets, then a token."""
        sources = [sample.source for sample in self.expected.samples]
        # With the start token a prompt is no longer than a full target.
        targets = [sample.target[:-1] for sample in self.expected.samples]
        if not whole:
            sources = sources[:2]
            targets = [target[:length] for target, length in zip(targets, REPLAY_TOKENS, strict=False)]
        prompts = [[self.decoder_start, *target[:-1]] for target in targets]

        def decode(program: Program) -> None:
            run = self.open_beside(artifact, program).start_run(sources, 1, max(map(len, targets)) + 1)
            run.prefill(prompts)
            run.decode([target[-1] for target in targets])

        if artifact.graph == "encoder":
            step = Step("sources", count_positions(pad(sources, "right")[1]))
            return self.make_source_replay(artifact, sources, step, range(len(sources)))
        prefill = count_positions(pad(prompts, artifact.padding_side)[1])
        last = np.array([[len(prompt)] for prompt in prompts])
        readings = [self.make_reading(*pair) for pair in zip(sources, targets, strict=True)]
        return Replay(decode, (Step("prefill", prefill), Step("decode", last)), tuple(readings))

    def make_source_replay(
        self, artifact: Artifact, sources: Sequence[Sequence[int]], step: Step, compared: Container[int]
    ) -> Replay:
        """Return the replay of an encoder that reads sources, of which some rows are compared."""

        def encode(program: Program) -> None:
            self.open_beside(artifact, program).encoder.encode(sources)

        rows = enumerate(sources)
        readings = [self.make_reading(source) if row in compared else None for row, source in rows]
        return Replay(encode, (step,), tuple(readings))

    def make_spot_replay(self, artifact: Artifact, spot: Spot) -> Replay | None:
        draws = self.expected.draws
        assert draws is not None  # nothing else has spots
        number, _, row = spot
        if artifact.graph == "encoder":
            sources = draws.list_sources(draws.batches[number])
            positions = np.full((len(sources), max(map(len, sources))), PADDING)
            positions[row, : len(sources[row])] = np.arange(len(sources[row]))
            return self.make_source_replay(artifact, sources, Step("sources", positions), [row])

        def open_decoder(program: Program) -> tuple[Decoder, SourceEncoder]:
            engine = self.open_beside(artifact, program)
            return engine.decoder, engine.encoder

        source = draws.sources[0 if number == STEPS else draws.batches[number].texts[row]]
        target = find_text(draws, spot, artifact)[1:]
        return make_draw_replay(artifact, draws, spot, self.make_reading(source, target), open_decoder)

    def open_beside(self, artifact: Artifact, program: Program) -> Engine:
        """Open the graph that a program runs, and the one that it runs with from the bundle."""

        def open_program(other: Artifact) -> Program:
            if other == artifact:
                return program
            if self.open_other is not None:
                return self.open_other(other)
            return OrtCpuBackend().open(self.bundle, other)

        return self.open(artifact, open_program)

    def make_reading(self, source: Sequence[int], target: Sequence[int] | None = None) -> Reading:
        """Return what runs PyTorch over a source and a target; without one, the encoder alone."""

        # No keys and values of a translator are int8, so it does without their rounding.
        def read(model: ReferenceModel, rounding: Rounding | None) -> object:
            from ..reference.translation import make_reference

            reference = make_reference(model, self.decoder_start)
            if target is None:
                return reference.compute_keys_values(source)
            # The model is fed a target but for its last token, so there has to be one more.
            return reference.compute_results(source, [*target, 0])

        return read


class SearchFollower:
    """PyTorch beside an engine's beam search, each source by itself and without padding."""

    def __init__(self, reference: Reference, samples: Sequence[Sample], beams: int) -> None:
        self.beams = beams
        self.runs = [reference.start_run(sample.source, beams) for sample in samples]
        self.scales = [measure_scale(sample.logits) for sample in samples]
        self.errors: list[float] = []

    def compare(self, logits: Logits, tokens: Sequence[int], active: Sequence[bool]) -> None:
        for number, run in enumerate(self.runs):
            rows = self.find_rows(number)
            if active[rows.start]:
                want = run.decode(tokens[rows])
                self.errors.append(measure_error(logits[rows], want, self.scales[number]))

    def copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        for number, run in enumerate(self.runs):
            rows = self.find_rows(number)
            run.copy_rows(
                [(a - rows.start, b - rows.start) for a, b in copies if rows.start <= a < rows.stop]
            )

    def find_rows(self, number: int) -> slice:
        """Return the rows of a source, which are adjacent."""
        return slice(number * self.beams, (number + 1) * self.beams)
