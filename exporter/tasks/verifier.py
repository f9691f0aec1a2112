"""Compares a bundle's graphs with PyTorch's answers, in the cases of their task."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from ...runtime.apps.check.case import Case, CaseSet, Location, Row
from ...runtime.apps.check.case_arrays import from_arrays, to_arrays
from ...runtime.apps.check.files import Arrays
from ...runtime.apps.check.judge import Engine, Limits, list_comparisons
from ...runtime.apps.check.outcome import Comparison, Outcome
from ...runtime.apps.check.translator import find_targets
from ...runtime.apps.stage_progress import CountedLine, StageCounter
from ...runtime.backends.backend import Program
from ...runtime.backends.openvino_backend import OpenVinoBackend, explain_no_bf16
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ..execution.node_executor import ROUNDING_ENGINE, ExecutedProgram, NodeExecutor, NotFiniteError
from ..execution.on_cpu import open_on_cpu
from ..execution.replay import Replay, cut_case, make_replay
from ..levels import FULL, Level
from ..limits import NOTHING_ACCEPTED, TABLE, Accepted, Gaps, compute_limits
from ..passes.unrounded import skip_rounding
from ..passes.weight_files import load_graph
from ..precisions import PRECISIONS
from ..reference_model import offload_weights, restore_weights
from .answer_cache import KEPT, compute_gaps_key, compute_key, keep_answers, read_answers, read_limit
from .base import OpenProgram, Progress, Task
from .fitted_head import LinearHead
from .gaps import find_key, gaps_from_arrays, gaps_to_arrays, measure_gaps
from .registry import TASKS

if TYPE_CHECKING:
    from ...runtime.apps.check.translator import TranslatorEngine
    from ..reference_model import ReferenceModel
    from .rounding import Rounding


log = logging.getLogger("planforge")


@dataclass(frozen=True)
class Verifier:
    """A bundle's graphs, and the model's results for the same texts."""

    bundle: Bundle
    expected: CaseSet  # what is compared, with the model's answers
    model: ReferenceModel | None = field(default=None, kw_only=True)  # where PyTorch is there
    level: Level = field(default=FULL, kw_only=True)  # how much of it was computed
    answers_kept: bool = field(default=False, kw_only=True)  # whether an earlier run computed the results
    answers_key: str = field(default="", kw_only=True)  # what the results are kept under; "" keeps nothing
    open_other: OpenProgram | None = None  # opens what a replay's graph runs with; else the bundle's file is

    @property
    def task(self) -> Task:
        """Return the row of the bundle's task."""
        return TASKS[self.bundle.manifest.task]

    @property
    def runs_model(self) -> bool:
        """Return whether comparing a graph runs the model in PyTorch once more, apart from its searches."""
        return self.expected.search is not None

    def collect_golden(self) -> Arrays:
        """Return the model's results in the form of golden data."""
        return to_arrays(self.task.thin_for_file(self.expected))

    @contextmanager
    def restore(self, model: ReferenceModel) -> Iterator[None]:
        """Let the model compute inside the context; afterwards only searches need its weights."""
        restore_weights(model)
        try:
            yield
        finally:
            if not self.runs_model:
                offload_weights(model)

    def answer_again(self, model: ReferenceModel, golden: CaseSet) -> Arrays:
        """Return golden data with the model's current answers."""
        with self.restore(model):
            reference = self.task.open_reference(model, self.bundle, None)
            answer = partial(self.task.answer, model, self.bundle)
            again = self.task.answer_again(reference, answer, golden)
        return replace(self, expected=again).collect_golden()

    def thin(self, texts: int) -> Verifier:
        """Return a verifier that measures with so few texts, where there are many; else this one."""
        return replace(self, expected=self.task.thin(self.expected, texts), answers_key="")

    def run_calibration_texts(self, model: ReferenceModel) -> None:
        """Run the model over real texts that no comparison uses."""
        self.task.calibrate(self.task.open_reference(model, self.bundle, None), self.expected)

    def measure_gaps(self, model: ReferenceModel, rounding: Rounding) -> Gaps:
        """Measure how far the rounded model in PyTorch is from the unrounded one, or take the kept result."""
        key = compute_gaps_key(self.answers_key, rounding) if self.answers_key else ""
        if key and (arrays := read_answers(key)) is not None:
            return gaps_from_arrays(arrays)
        gaps = measure_gaps(self.task, model, self.bundle, self.expected, rounding)
        if key:
            keep_answers(key, gaps_to_arrays(gaps))
        return gaps

    def measure_fp32_gaps(self, model: ReferenceModel) -> Gaps:
        """Measure how far the model in PyTorch in fp32 is from float64."""
        from .rounding import Rounding

        with self.restore(model):
            return self.measure_gaps(model, Rounding(exact=True))

    def choose_limits(
        self, precision: str, gaps: Gaps, accepted: Accepted = NOTHING_ACCEPTED
    ) -> dict[str, float]:
        """Return the limits of a precision, from the table of caps and the effect of rounding in PyTorch."""
        limits = {}
        for measure in self.task.list_measures(self.expected):
            names = [name for name in measure.limited if name in TABLE]
            if names:
                own = compute_limits(precision, gaps.get(find_key(measure)), names, accepted)
                limits.update({f"{measure.prefix}{name}": limit for name, limit in own.items()})
        return limits | self.task.limit_others(self.expected, gaps, limits)

    def name_precision_errors(self, gaps: Gaps) -> dict[str, float]:
        """Return the effect of rounding in PyTorch, by the names of the limits."""
        return {
            f"{measure.prefix}{name}": float(getattr(gap, name))
            for measure in self.task.list_measures(self.expected)
            if (gap := gaps.get(find_key(measure))) is not None
            for name in measure.limited
        }

    def measure_failed_search(self, artifact: Artifact, rounding: Rounding) -> dict[str, float]:
        """Return the effect of rounding in PyTorch on the targets that a graph's own search finds.

        A search that leaves PyTorch's may come to targets at which the model is less sure.
        """
        measure = self.task.measure_found
        assert self.model is not None and measure is not None
        engine = self.open(artifact)
        try:
            found = find_targets(cast("TranslatorEngine", engine), self.expected)
        finally:
            engine.close()
        reference = self.task.open_reference(self.model, self.bundle, None)
        return self.name_precision_errors(measure(reference, self.model, self.expected, found, rounding))

    def open(self, artifact: Artifact, open_program: OpenProgram | None = None) -> Engine:
        """Open a graph, and the one that it runs with if any; on ONNX Runtime by default."""
        return self.task.open(self.bundle, artifact, open_program or self.open_program)

    def open_program(self, artifact: Artifact) -> Program:
        """Open a graph on ONNX Runtime; every file was hashed, or has just been written."""
        return open_on_cpu(self.bundle, artifact)

    def open_beside_model(self, artifact: Artifact) -> Engine:
        """Open a graph whose searches PyTorch follows, if there is a model."""
        engine = self.open(artifact)
        if self.model is None:
            return engine
        reference = self.task.open_reference(self.model, self.bundle, None)
        return self.task.follow(engine, reference, self.expected)

    def compare(
        self, artifact: Artifact, limits: Limits, progress: Progress = lambda _: None
    ) -> list[Comparison]:
        """Compare a graph with the model in every case on ONNX Runtime; in fp16 also node by node.

        Node by node does what an engine that computes in fp16 would do, which a CPU's does not.
        """
        engine = self.open_beside_model(artifact)
        try:
            found = [*self.compare_cases(engine, OrtCpuBackend.name, artifact, limits, progress)]
        finally:
            engine.close()
        if PRECISIONS[artifact.precision].engine:
            found += self.compare_on_openvino(artifact, limits, progress)
        if artifact.is_half:
            few = replace(self, expected=replace(self.expected, cases=self.expected.few))
            engine = self.open(artifact, self.execute)
            found += few.compare_cases(engine, ROUNDING_ENGINE, artifact, limits, progress)
        return found

    def compare_on_openvino(
        self, artifact: Artifact, limits: Limits, progress: Progress
    ) -> Iterator[Comparison]:
        """Compare a graph whose products OpenVINO rounds; a warning says where it does not do that here."""
        if reason := explain_no_bf16():
            log.warning("%s is compared in fp32 alone: %s", artifact.id, reason)
            return
        engine = self.open(artifact, partial(OpenVinoBackend().open, self.bundle))
        try:
            yield from self.compare_cases(engine, OpenVinoBackend.name, artifact, limits, progress)
        finally:
            engine.close()

    def execute(self, artifact: Artifact) -> Program:
        """Open a graph that runs node by node, without the rounding of activations of an import's author."""
        model = load_graph(self.bundle.path(artifact.file))
        skip_rounding(model)
        return ExecutedProgram(NodeExecutor(model), artifact)

    def compare_cases(
        self, engine: Engine, name: str, artifact: Artifact, limits: Limits, progress: Progress
    ) -> Iterator[Comparison]:
        """Compare a graph on an engine of this name, case by case."""
        cases = list_comparisons(engine, self.expected, artifact, limits)
        padded = {case.name for case in self.expected.cases if case.is_padded}
        for number, (case, compare) in enumerate(cases.items()):
            where = "" if name == OrtCpuBackend.name else f", {name}"
            progress(CountedLine(f"verifying {artifact.id}: {case}{where}", number, len(cases), "cases"))
            try:
                outcome = compare()
            except NotFiniteError as error:
                outcome = Outcome({"finite": False}, {}, (str(error),))
            yield Comparison(
                artifact=artifact.id, backend=name, case=case, is_padded=case in padded, **vars(outcome)
            )

    def make_replay(self, artifact: Artifact, whole: bool = False) -> Replay:
        """Return a replay: a little real text to run through a graph; as much as ranges need if `whole`."""
        cases = self.expected.ranges if whole else self.expected.replays
        return self.replay(artifact, next(case for case in cases if case.graph == artifact.graph))

    def make_location_replay(self, artifact: Artifact, location: Location) -> Replay:
        """Return the replay of the location where a case failed first."""
        case = location.case if location.case.runner == "once" else cut_case(location.case, location.step)
        return self.replay(artifact, case, location.row)

    def replay(self, artifact: Artifact, case: Case, row: int | None = None) -> Replay:
        """Return the replay of a case, or of a row of it, through one graph, together with its companion."""

        def drive(program: Program, case_set: CaseSet, case: Case) -> None:
            with ExitStack() as partners:  # what the graph runs with is opened for this run alone

                def open_program(other: Artifact) -> Program:
                    if other == artifact:
                        return program
                    return partners.enter_context(closing((self.open_other or self.open_program)(other)))

                for _ in self.open(artifact, open_program).run(case_set, case):
                    pass

        def read(row: Row, model: ReferenceModel, rounding: Rounding | None) -> object:
            reference = self.task.open_reference(model, self.bundle, rounding)
            return self.task.read_row(reference, self.expected, case, row)

        return make_replay(artifact, self.expected, case, drive, read, row)


def open_verifier(
    bundle: Bundle,
    model: ReferenceModel,
    texts: Sequence[str],
    progress: Progress = lambda _: None,
    seed: int = 0,
    level: Level = FULL,
    checkpoint: str = "",
) -> Verifier:
    """Return the bundle's verifier, with the model's results for the texts and for random cases.

    `checkpoint` is the hash of the files that the model was loaded from. With it the model's answers are
    kept, and what rounding does to them, and those of an earlier run are taken; but "full" asks anew.
    """
    task = TASKS[bundle.manifest.task]
    asked = task.choose(model, bundle, texts, seed, level)
    key = ""
    if checkpoint and level is not FULL and read_limit():
        key = compute_key(checkpoint, model, asked, LinearHead.load(bundle))
        if (arrays := read_answers(key)) is not None:
            progress(f"reading PyTorch's answers, {KEPT}")
            kept = from_arrays(arrays)
            answered = replace(asked, texts=kept.texts, answers=kept.answers)
            return Verifier(bundle, answered, model=model, level=level, answers_kept=True, answers_key=key)
    stage = "computing the reference in PyTorch"
    progress(stage)
    answered = task.answer(model, bundle, asked, StageCounter(progress, stage, "parts"))
    if key:
        keep_answers(key, to_arrays(answered))
    return Verifier(bundle, answered, model=model, level=level, answers_key=key)


def open_golden_verifier(bundle: Bundle, arrays: Arrays) -> Verifier:
    """Return the bundle's verifier, with golden data as results; raise KeyError if one is missing."""
    return Verifier(bundle, from_arrays(arrays))
