"""Compares an engine on this machine with a bundle's golden data, without PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ...backends.backend import LoadRequest
from ...bundle.bundle import Bundle
from ...bundle.manifest import Artifact
from ...errors import BundleError
from ...tasks import find_class

# Imported when they are needed, so that `import planforge.runtime` stays quick.
if TYPE_CHECKING:
    from ...backends.placement import Placement
    from .cases import Skipped
    from .files import Arrays
    from .judge import Compare
    from .outcome import Comparison

Limits: TypeAlias = Mapping[str, Mapping[str, float]]  # of each metric, by precision


@dataclass(frozen=True)
class SelftestResult:
    """What was compared with PyTorch's answers, and what could not be.

    Attributes:
        backend: the engine.
        artifacts: ids of the graphs that ran; of a plan, the one that it was built from.
        comparisons: one per graph and case, with what was measured and what is allowed.
        nodes: where the nodes of each graph ran, by its id; of ONNX Runtime on a GPU alone.
        texts: how texts and chats are read and written, compared with the golden texts.
        skipped: golden data that is too large for the graphs, or for their plans; golden texts that are not
            there.
        seconds: for everything, hashing the files and loading the engine included.
    """

    backend: str
    artifacts: tuple[str, ...]
    comparisons: tuple[Comparison, ...]
    skipped: tuple[Skipped, ...]
    seconds: float
    texts: tuple[Comparison, ...] = ()
    nodes: Mapping[str, Placement] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether something was compared of every graph, and nothing failed."""
        compared = {comparison.artifact for comparison in self.comparisons}
        all_passed = all(c.passed for c in (*self.texts, *self.comparisons))
        return compared == set(self.artifacts) and all_passed

    def to_json(self) -> dict[str, object]:
        """Return the fields of `planforge selftest --json`."""
        return {
            "passed": self.passed,
            "backend": self.backend,
            "artifacts": list(self.artifacts),
            "texts": [comparison.to_json() for comparison in self.texts],
            "comparisons": [comparison.to_json() for comparison in self.comparisons],
            "skipped": [asdict(each) for each in self.skipped],
            "nodes": {name: placement.to_json() for name, placement in self.nodes.items()},
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Subject:
    """A graph that was opened, the cases to compare it in, and the golden data that it skips."""

    artifact: Artifact
    cases: Mapping[str, Compare]
    skipped: Sequence[Skipped]


def selftest(
    bundle: str | Path,
    backend: str = "auto",
    precision: str | None = None,
    device: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> SelftestResult:
    """Compare logits and tokens on one engine with those that PyTorch gave at export.

    Before, texts become ids, ids become texts, and chats are rendered: all as at export. The model is opened
    as `load` opens it, after every file of the bundle was hashed, and driven through the runtime's own loops:
    caches, padded batches, greedy text. An engine, free to choose, may leave PyTorch's tokens where two
    logits inside their limits could have changed places.

    Args:
        bundle: the folder that `planforge export` wrote.
        backend: as in `load`.
        precision: as in `load`.
        device: the GPU's number.
        progress: called with a line when a stage begins.

    Raises:
        BundleError: the bundle has no golden data; or a file is missing or has changed.
        BackendUnavailableError: the backend cannot run here; says what is missing.
        BackendError: the engine does not load a graph, or fails while running.
    """
    from .files import name_damage
    from .tasks import TASKS
    from .texts import compare_texts

    started = time.perf_counter()
    opened = Bundle.open(bundle)
    model_class = find_class(opened)
    arrays, limits = load_golden(opened)
    progress("checking files")
    opened.verify_files()
    progress("comparing how texts are read")
    texts, not_read = compare_texts(opened)
    progress("loading it")

    comparisons: list[Comparison] = []
    request = LoadRequest(backend=backend, precision=precision, device=device)
    with name_damage(opened), model_class._load(opened, request) as model:
        subjects = prepare_subjects(model, opened, arrays, limits)
        for subject in subjects:
            comparisons += compare_cases(subject, model.backend, progress)
        # Of a graph that failed its own cases say more.
        compare_answers = TASKS[opened.manifest.task].compare_texts
        if compare_answers is not None and all(comparison.passed for comparison in comparisons):
            progress("texts to texts")
            texts += compare_answers(model, opened.manifest, arrays, limits)
    return SelftestResult(
        backend=model.backend,
        artifacts=tuple(subject.artifact.id for subject in subjects),
        comparisons=tuple(comparisons),
        skipped=(*not_read, *(each for subject in subjects for each in subject.skipped)),
        seconds=time.perf_counter() - started,
        texts=tuple(texts),
        nodes=model.placements,
    )


def prepare_subjects(model: Any, bundle: Bundle, arrays: Arrays, limits: Limits) -> list[Subject]:
    """Prepare the cases of every graph that an open model runs."""
    from .case_arrays import from_arrays
    from .judge import list_comparisons
    from .tasks import TASKS

    engine = TASKS[bundle.manifest.task].open(model)
    try:
        case_set = from_arrays(arrays)
        return [
            Subject(
                artifact,
                list_comparisons(engine, case_set, artifact, limits[artifact.precision]),
                case_set.list_skipped(artifact, engine.encoding),
            )
            for artifact in engine.artifacts
        ]
    except KeyError as error:
        raise make_outdated_error(bundle, error) from error


def compare_cases(subject: Subject, backend: str, progress: Callable[[str], None]) -> list[Comparison]:
    """Compare a graph with PyTorch's answers in each of its cases."""
    from .outcome import Comparison

    name = subject.artifact.id
    comparisons = []
    for case, run in subject.cases.items():
        progress(f"{name}: {case}")
        outcome = run()
        comparisons.append(Comparison(artifact=name, backend=backend, case=case, **vars(outcome)))
    return comparisons


def load_golden(bundle: Bundle) -> tuple[Arrays, Limits]:
    """Load a bundle's golden data and its limits."""
    from .files import find_golden, read_golden

    file = find_golden(bundle)
    if file is None:
        raise BundleError(
            f"{bundle.folder} has no golden data to test with: it was exported with --no-verify, so export it"
            " again without that option; or another tool chose how activations are rounded, so there is none:"
            f" compare it by planforge verify {bundle.folder}"
        )
    try:
        return read_golden(file)
    except KeyError as error:
        raise make_outdated_error(bundle, error) from error


def make_outdated_error(bundle: Bundle, missing: KeyError) -> BundleError:
    return BundleError(
        f"the golden data of {bundle.folder} was written by another version of PlanForge, and lacks"
        f" {missing}; export the bundle again"
    )
