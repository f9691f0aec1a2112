"""The base class of examiners, which hold a bundle's graphs against the model that they come from."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from ...runtime.backends.backend import Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.diagnostics.golden.cases import Case
from ...runtime.diagnostics.golden.files import Arrays
from ...runtime.diagnostics.metrics import Comparison, Outcome
from ..execution.node_executor import ExecutedProgram, NotFiniteError, name_rounding_engine
from ..execution.trial import Trial
from ..limits import Gaps
from ..passes.weight_files import load_graph

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel
    from ..reference.rounding import Rounding

Progress = Callable[[str], None]
OpenProgram: TypeAlias = Callable[[Artifact], Program]


class Engine(Protocol):
    """The runtime's own loop over an opened graph."""

    def close(self) -> None: ...


EngineT = TypeVar("EngineT", bound=Engine)


@dataclass(frozen=True)
class Examiner(ABC, Generic[EngineT]):
    """A bundle's graphs beside what the model computes for the same texts.

    Each kind of model has a subclass, which keeps the model's results in a field `expected`.

    Attributes:
        bundle: the bundle whose graphs are examined.
    """

    bundle: Bundle

    def with_bundle(self, bundle: Bundle) -> Examiner[EngineT]:
        """Return an examiner of another bundle of the same model, with the same results."""
        return dataclasses.replace(self, bundle=bundle)

    @classmethod
    @abstractmethod
    def from_model(cls, bundle: Bundle, model: ReferenceModel, texts: Sequence[str]) -> Examiner[EngineT]:
        """Compute what the model gives for real texts.

        Raises:
            VerificationError: the texts cannot be used, or the model is not finite.
        """

    @classmethod
    @abstractmethod
    def from_arrays(cls, bundle: Bundle, arrays: Arrays) -> Examiner[EngineT]:
        """Take the results from golden data instead of a model.

        Raises:
            KeyError: an array is missing.
        """

    @abstractmethod
    def to_arrays(self) -> Arrays:
        """Return the model's results as golden data keeps them."""

    @abstractmethod
    def measure_gaps(self, model: ReferenceModel, rounding: Rounding) -> Gaps:
        """Measure how far the model in PyTorch, rounded, is from itself unrounded."""

    @abstractmethod
    def run_calibration_texts(self, model: ReferenceModel) -> None:
        """Run the model over real texts that no comparison uses."""

    @abstractmethod
    def limits(self, precision: str, gaps: Gaps) -> dict[str, float]:
        """Return the limits of a precision, from the table of caps and the effect of rounding in PyTorch.

        Raises:
            ValueError: the rounded model is not finite.
        """

    @abstractmethod
    def open(self, artifact: Artifact, open_program: OpenProgram) -> EngineT:
        """Open a graph, and the one that it runs with if it has one."""

    @abstractmethod
    def cases(self, engine: EngineT, artifact: Artifact, limits: Mapping[str, float]) -> dict[str, Case]:
        """Return the cases to compare an engine in, by their names."""

    @abstractmethod
    def node_by_node_cases(
        self, engine: EngineT, artifact: Artifact, limits: Mapping[str, float]
    ) -> dict[str, Case]:
        """Return the few cases to compare a graph in that is run node by node, which is slow."""

    @abstractmethod
    def trial(self, artifact: Artifact, whole: bool = False, open_other: OpenProgram | None = None) -> Trial:
        """Return a trial: a little real text to run through a graph.

        Args:
            artifact: the graph.
            whole: take as much text as measuring ranges needs.
            open_other: opens the graph that this one runs with, instead of the bundle's file.
        """

    def compare(
        self, artifact: Artifact, limits: Mapping[str, float], progress: Progress = lambda _: None
    ) -> list[Comparison]:
        """Compare a graph with the model in every case on ONNX Runtime; in fp16 also node by node.

        Node by node does what an engine that computes in fp16 would do, which a CPU's does not.

        Returns:
            A comparison per case, passed or not.
        """
        backend = OrtCpuBackend()  # verify() hashed every file, export() has just written them

        def compare_cases(engine: EngineT, name: str, cases: Mapping[str, Case]) -> list[Comparison]:
            comparisons = []
            for case, run in cases.items():
                progress(f"verifying {artifact.id}: {case}{'' if name == backend.name else f', {name}'}")
                outcome = run_finite(run)
                comparisons.append(Comparison(artifact=artifact.id, backend=name, case=case, **vars(outcome)))
            return comparisons

        def open_node_by_node(other: Artifact) -> Program:
            return ExecutedProgram(load_graph(self.bundle.path(other.file)), other)

        engine = self.open(artifact, lambda other: backend.open(self.bundle, other))
        try:
            comparisons = compare_cases(engine, backend.name, self.cases(engine, artifact, limits))
        finally:
            engine.close()
        if artifact.precision == "fp16":
            engine = self.open(artifact, open_node_by_node)
            name = name_rounding_engine(artifact.precision)
            comparisons += compare_cases(engine, name, self.node_by_node_cases(engine, artifact, limits))
        return comparisons


def run_finite(run: Case) -> Outcome:
    """Return a case's outcome: without figures, and with the node's name, where a result is not finite."""
    try:
        return run()
    except NotFiniteError as error:
        return Outcome({"finite": False}, {}, (str(error),))
