"""The base class of examiners, which hold a bundle's graphs against the model that they come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from ...runtime.apps.check.case import CaseSet
from ...runtime.apps.check.cases import Case
from ...runtime.apps.check.files import Arrays
from ...runtime.apps.check.metrics import Comparison, Measured, Outcome, Spot
from ...runtime.backends.backend import Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.progress import CountedLine
from ..execution.node_executor import ROUNDING_ENGINE, ExecutedProgram, NotFiniteError
from ..execution.replay import Replay
from ..levels import FULL, Level
from ..limits import NOTHING_ACCEPTED, Accepted, Gaps, compute_limits
from ..passes.weight_files import load_graph

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..reference.model import ReferenceModel
    from ..reference.rounding import Rounding

Progress = Callable[[str], None]
OpenProgram: TypeAlias = Callable[[Artifact], Program]
Limits: TypeAlias = Mapping[str, float]  # by the metrics' names
Limited: TypeAlias = "tuple[str, Measured | None, Sequence[str]]"


class Engine(Protocol):
    """The runtime's own loop over an opened graph."""

    def close(self) -> None: ...


EngineT = TypeVar("EngineT", bound=Engine)


@dataclass(frozen=True)
class Examiner(ABC, Generic[EngineT]):
    """A bundle's graphs beside what the model computes for the same texts."""

    runs_model: ClassVar[bool] = False  # whether comparing a graph runs the model in PyTorch once more

    bundle: Bundle
    expected: CaseSet  # what is compared, with the model's answers
    model: ReferenceModel | None = field(default=None, kw_only=True)  # where PyTorch is there
    level: Level = field(default=FULL, kw_only=True)  # how much of it was computed
    answers_kept: bool = field(default=False, kw_only=True)  # whether an earlier run computed the results
    open_other: OpenProgram | None = None  # opens what a replay's graph runs with; else the bundle's file is

    @abstractmethod
    def collect_golden(self) -> Arrays:
        """Return the model's results as golden data keeps them."""

    @abstractmethod
    def measure_gaps(self, model: ReferenceModel, rounding: Rounding) -> Gaps:
        """Measure how far the model in PyTorch, rounded, is from itself unrounded."""

    def thin(self, texts: int) -> Self:
        """Return an examiner that measures with so few texts, where there are many; else this one."""
        return self

    @abstractmethod
    def run_calibration_texts(self, model: ReferenceModel) -> None:
        """Run the model over real texts that no comparison uses."""

    @abstractmethod
    def list_limited(self, gaps: Gaps) -> Iterator[Limited]:
        """Yield how limits' names begin, what rounding does there in PyTorch if known, and the metrics."""

    def choose_limits(
        self, precision: str, gaps: Gaps, accepted: Accepted = NOTHING_ACCEPTED
    ) -> dict[str, float]:
        """Return the limits of a precision, from the table of caps and the effect of rounding in PyTorch."""
        return {
            f"{prefix}{name}": limit
            for prefix, gap, names in self.list_limited(gaps)
            for name, limit in compute_limits(precision, gap, names, accepted).items()
        }

    def name_losses(self, gaps: Gaps) -> dict[str, float]:
        """Return what rounding does in PyTorch, by the names of the limits."""
        return {
            f"{prefix}{name}": float(getattr(gap, name))
            for prefix, gap, names in self.list_limited(gaps)
            if gap is not None
            for name in names
        }

    @abstractmethod
    def open(self, artifact: Artifact, open_program: OpenProgram) -> EngineT:
        """Open a graph, and the one that it runs with if it has one."""

    @abstractmethod
    def list_cases(self, engine: EngineT, artifact: Artifact, limits: Limits) -> dict[str, Case]:
        """Return the cases to compare an engine in, by their names."""

    @abstractmethod
    def list_slow_cases(self, engine: EngineT, artifact: Artifact, limits: Limits) -> dict[str, Case]:
        """Return the few cases to compare a graph in that is run node by node, which is slow."""

    @abstractmethod
    def make_replay(self, artifact: Artifact, whole: bool = False) -> Replay:
        """Return a replay: a little real text to run through a graph; as much as ranges need if `whole`."""

    def make_spot_replay(self, artifact: Artifact, spot: Spot) -> Replay | None:
        """Return the replay of the spot where a case of many runs failed first; None without one."""
        return None

    def compare(
        self, artifact: Artifact, limits: Limits, progress: Progress = lambda _: None
    ) -> list[Comparison]:
        """Compare a graph with the model in every case on ONNX Runtime; in fp16 also node by node.

        Node by node does what an engine that computes in fp16 would do, which a CPU's does not.
        """
        backend = OrtCpuBackend()  # verify() hashed every file, export() has just written them

        def compare_cases(engine: EngineT, name: str, cases: Mapping[str, Case]) -> Iterator[Comparison]:
            for number, (case, run) in enumerate(cases.items()):
                line = f"verifying {artifact.id}: {case}{'' if name == backend.name else f', {name}'}"
                progress(CountedLine(line, number, len(cases), "cases"))
                try:
                    outcome = run()
                except NotFiniteError as error:
                    outcome = Outcome({"finite": False}, {}, (str(error),))
                yield Comparison(artifact=artifact.id, backend=name, case=case, **vars(outcome))

        engine = self.open(artifact, lambda other: backend.open(self.bundle, other))
        try:
            comparisons = [*compare_cases(engine, backend.name, self.list_cases(engine, artifact, limits))]
        finally:
            engine.close()
        if artifact.precision == "fp16":
            engine = self.open(artifact, lambda a: ExecutedProgram(load_graph(self.bundle.path(a.file)), a))
            cases = self.list_slow_cases(engine, artifact, limits)
            comparisons += compare_cases(engine, ROUNDING_ENGINE, cases)
        return comparisons
