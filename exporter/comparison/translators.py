"""Runs a translator's cases through the runtime's own loop and compares every answer with PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ...runtime.apps.check import cases
from ...runtime.apps.check.case import Case, CaseSet, Row, Text, to_arrays
from ...runtime.apps.check.draws import PREFIX, measure_error
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
from ...runtime.apps.check.translator import (
    SEARCH,
    Engine,
    list_translator_comparisons,
    run_case,
    search_beams,
)
from ...runtime.backends.backend import Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.manifest import Artifact
from ...runtime.decoding.decoder import Decoder
from ...runtime.translate.source_encoder import SourceEncoder
from ...runtime.translate.sources import open_tokenizers
from ..execution.replay import Replay, cut_case, make_replay
from ..limits import CAPS, GAP_FACTOR, NOTHING_ACCEPTED, Accepted, Gaps
from ..tasks import translator_answers
from ..tasks.translator import CROSS, LOGITS
from .examiner import Examiner, Limited, Limits, OpenProgram

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel
    from ..reference.rounding import Rounding
    from ..reference.translation import Reference

REPLAY_TOKENS = (12, 7)  # at most, of the two targets of a replay


@dataclass(frozen=True)
class TranslationExaminer(Examiner[Engine]):
    """A translator's graphs beside the keys, values, logits and beams that the model computes."""

    runs_model: ClassVar[bool] = True  # to score targets that an engine finds

    def collect_golden(self) -> Arrays:
        return to_arrays(translator_answers.thin_for_file(self.expected))

    def measure_gaps(self, model: ReferenceModel, rounding: Rounding) -> Gaps:
        return translator_answers.measure_gaps(model, self.bundle, self.expected, rounding)

    def run_calibration_texts(self, model: ReferenceModel) -> None:
        """Run PyTorch over the sources to calibrate with, and over its translations of them."""
        translator_answers.translate(model, self.bundle, self.expected)

    def list_limited(self, gaps: Gaps) -> Iterator[Limited]:
        yield "", gaps.get(""), Metrics.LIMITED
        for prefix in ("cross.", "attention."):
            yield prefix, gaps.get(prefix), VectorMetrics.LIMITED
        for prefix in (SEARCH, PREFIX):
            yield prefix, gaps.get(prefix), DrawMetrics.LIMITED

    def choose_limits(
        self, precision: str, gaps: Gaps, accepted: Accepted = NOTHING_ACCEPTED
    ) -> dict[str, float]:
        limits = super().choose_limits(precision, gaps, accepted)
        # A logit's error moves a token's log-probability by at most twice as much, and so their mean. That is
        # the most: errors of many tokens cancel, so what rounding does to the scores themselves is held to.
        scale = max(map(measure_scale, (known.values for known in self.expected.answers["logits"].values())))
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
        assert self.model is not None
        engine = self.open(artifact, lambda other: OrtCpuBackend().open(self.bundle, other))
        texts: list[Text] = []
        try:
            own = self.expected
            searches = [case for case in own.cases if case.runner == "beams"]
            for case in (part for one in searches for part in own.fit(one, artifact, engine.encoding)):
                for row, found in zip(case.rows, search_beams(engine, own, case), strict=True):
                    text = own.texts[row.text]
                    texts += [replace(text, tokens=(text.tokens[0], *one.token_ids)) for one in found]
        finally:
            engine.close()
        gaps = translator_answers.measure_search_gaps(self.model, self.bundle, self.expected, texts, rounding)
        return self.name_losses(gaps)

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
            open_tokenizers(self.bundle),
        )

    def list_cases(self, engine: Engine, artifact: Artifact, limits: Limits) -> dict[str, cases.Case]:
        """Return the cases of one of the two graphs; PyTorch goes along with a search, if it is there."""
        own = engine if self.model is None else PyTorchModel(self.model, self)
        return list_translator_comparisons(engine, self.expected, artifact, limits, own)

    def list_slow_cases(self, engine: Engine, artifact: Artifact, limits: Limits) -> dict[str, cases.Case]:
        """Return the case of two texts, of a single token, and of the most."""
        if artifact.graph == "encoder":
            numbers = [n for n, text in enumerate(self.expected.texts) if text.source is None]
            numbers = [n for n in numbers if n in self.list_judged("encoder")]
            rows = tuple(Row(n, (len(self.expected.texts[n].tokens),)) for n in self.choose_few(numbers))
            slow = [Case(f"{len(rows)} sources", "encoder", rows, (CROSS,), "once")]
        else:
            logits = self.expected.answers["logits"]
            ends = {n: int(known.positions[-1]) + 1 for n, known in logits.items()}
            few = self.choose_few(sorted(ends))
            name = f"{len(few)} targets at once"
            slow = [Case(name, "decoder", (Row(n, (ends[n],)),), (LOGITS,), "every") for n in few]
        few_cases = replace(self.expected, cases=tuple(slow))
        return list_translator_comparisons(engine, few_cases, artifact, limits, engine)

    def list_judged(self, graph: str) -> list[int]:
        """Return the numbers of the texts of fixed cases of a graph, without what is random."""
        found = {
            row.text
            for case in self.expected.cases
            if case.graph == graph and "random" not in case.name
            for row in case.rows
        }
        return sorted(found)

    @staticmethod
    def choose_few(numbers: Sequence[int]) -> list[int]:
        """Return two texts, a single token and the longest, which stand behind the others."""
        return list(dict.fromkeys([*numbers[:2], *numbers[-2:]]))

    def make_replay(self, artifact: Artifact, whole: bool = False) -> Replay:
        """Return a replay of two unequal, padded sources; for a decoder of their targets, then a token."""
        if artifact.graph == "encoder":
            numbers = self.list_judged("encoder")
            rows = tuple(
                Row(n, (len(self.expected.texts[n].tokens),)) for n in (numbers if whole else numbers[:2])
            )
            return self.replay(artifact, Case("sources", "encoder", rows, (), "once"))
        targets = sorted(self.expected.answers["logits"])
        chosen = targets if whole else targets[:2]
        ends = [len(self.expected.texts[n].tokens) - 1 for n in chosen]
        ends = ends if whole else [min(pair) for pair in zip(ends, REPLAY_TOKENS, strict=True)]
        rows = tuple(Row(n, (end - 1, end)) for n, end in zip(chosen, ends, strict=True))
        return self.replay(artifact, Case("targets", "decoder", rows, ()))

    def make_spot_replay(self, artifact: Artifact, spot: Spot) -> Replay | None:
        number, step, row = spot
        case = self.expected.cases[number]
        return self.replay(artifact, case if case.runner == "once" else cut_case(case, step), row)

    def replay(self, artifact: Artifact, case: Case, row: int | None = None) -> Replay:
        """Return the replay of a case of one graph, beside the other one."""
        return make_replay(artifact, self.expected, case, TranslatorReplay(self, artifact), row)

    def open_beside(self, artifact: Artifact, program: Program) -> Engine:
        """Open the graph that a program runs, and the one that it runs with from the bundle."""

        def open_program(other: Artifact) -> Program:
            if other == artifact:
                return program
            if self.open_other is not None:
                return self.open_other(other)
            return OrtCpuBackend().open(self.bundle, other)

        return self.open(artifact, open_program)


@dataclass(frozen=True)
class TranslatorReplay:
    """How a translator's cases are replayed: one graph node by node, beside the other one."""

    examiner: TranslationExaminer
    artifact: Artifact

    def drive(self, program: Program, case_set: CaseSet, case: Case) -> None:
        engine = self.examiner.open_beside(self.artifact, program)
        for _ in run_case(engine, case_set, 0, case):
            pass

    # No keys and values of a translator are int8, so it does without their rounding.
    def read(self, case_set: CaseSet, row: Row, model: ReferenceModel, rounding: Rounding | None) -> object:
        """Run PyTorch over a source, or over a target up to a row's end."""
        reference = translator_answers.open_reference(model, self.examiner.bundle)
        text = case_set.texts[row.text]
        if text.source is None:
            return reference.compute_keys_values(text.tokens)
        short = replace(text, tokens=text.tokens[: row.ends[-1]])
        return translator_answers.compute_results(reference, case_set, short)


class PyTorchModel:
    """PyTorch, which scores the targets that an engine's search finds, and goes along with it."""

    def __init__(self, model: ReferenceModel, examiner: TranslationExaminer) -> None:
        self.reference = translator_answers.open_reference(model, examiner.bundle)
        self.scales = translator_answers.find_scales(examiner.expected)

    def score(self, source: Sequence[int], target: Sequence[int]) -> float:
        return self.reference.score(source, tuple(target[1:]))

    def follow(self, case_set: CaseSet, case: Case) -> SearchFollower:
        assert case_set.search is not None
        numbers = [case_set.texts[row.text].source for row in case.rows]
        sources = [(case_set.texts[n].tokens, self.scales[n]) for n in numbers if n is not None]
        return SearchFollower(self.reference, sources, case_set.search.num_beams)


class SearchFollower:
    """PyTorch beside an engine's beam search, each source by itself and without padding."""

    def __init__(
        self, reference: Reference, sources: Sequence[tuple[tuple[int, ...], float]], beams: int
    ) -> None:
        self.beams = beams
        self.runs = [reference.start_run(source, beams) for source, _ in sources]
        self.scales = [scale for _, scale in sources]  # of the errors of each
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
