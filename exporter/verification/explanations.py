"""Compares the graphs that explain a model with PyTorch, or with the answers that a bundle keeps.

Embeddings and hidden states are too large to keep: the file has the tokens that they are made of.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from ...runtime.apps.check.files import choose_evenly, name_damage, read_golden, write_golden
from ...runtime.apps.check.outcome import Comparison
from ...runtime.apps.stage_progress import CountedLine
from ...runtime.backends.backend import Array, Arrays, Program
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.export_again import name_checkpoint
from ...runtime.bundle.manifest import Artifact
from ...runtime.errors import BackendError
from ..bundle.names import name_by_content
from ..errors import VerificationError
from ..execution.replay import Replay, Step
from ..limits import measure_distance
from ..passes.weight_files import load_graph
from ..reference_model import is_module, restore_weights
from ..tasks.base import Progress
from ..tasks.explanation import INTEGERS, LAYERS, SMALLEST, ExplanationCase, Reference, read_inside, widen
from ..tracing.recipes import Recipe
from .bisect import FirstMismatch, find_first_mismatch, make_node_tolerances
from .explain import Tracer, name_nodes
from .finite import find_not_finite
from .reading import list_tensors_to_compare
from .report import VerificationReport
from .structure import CASE, check_weights, report_reading, shorten

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel

PREFIX = "checks/explain-"  # of the file's name
KEPT_VALUES = 256  # of each result
REMADE = ("hidden", "embeddings", "source_embeddings")  # inputs that `layers` gives
UNNAMED = "every node of it is within its tolerance in the case that failed: small errors may add up"


def verify_explanations(
    report: VerificationReport,
    bundle: Bundle,
    model: ReferenceModel,
    recipes: Mapping[str, Recipe],
    trace: Tracer,
    seed: int,
    progress: Progress,
) -> tuple[VerificationReport, dict[str, list[ExplanationCase]]]:
    """Return the report with the graphs that explain the model, compared with PyTorch.

    And the cases that a bundle keeps, by their graphs' ids, with the limits that counted.
    """
    explanations = bundle.manifest.explanations
    if not explanations:
        return report, {}
    assert is_module(model)
    restore_weights(model)
    tensors = list_tensors_to_compare(bundle, model)
    comparisons = [compare_weights(bundle, artifact, tensors) for artifact in explanations]
    reference = Reference(model, recipes, seed)
    failed: dict[str, ExplanationCase] = {}
    kept: dict[str, list[ExplanationCase]] = {}
    for artifact in explanations:
        recipe = recipes[artifact.recipe_id]
        cases = list(reference.list_cases(recipe))
        for case, comparison in run_cases(bundle, artifact, cases, progress):
            if not comparison.passed and artifact.id not in failed:  # else it has failed already
                case = widen(case, model, recipe)
                ((_, comparison),) = run_cases(bundle, artifact, [case], lambda _: None)
            comparisons.append(comparison)
            if not comparison.passed:
                failed.setdefault(artifact.id, case)
            if case.is_kept:
                kept.setdefault(artifact.id, []).append(case)
    report = dataclasses.replace(report, comparisons=(*report.comparisons, *comparisons))

    def search(artifact: Artifact, fresh: ir.Model | None) -> FirstMismatch | None:
        assert fresh is not None
        replay = make_replay(failed[artifact.id])
        tolerances = make_node_tolerances(replay, artifact, fresh, artifact, fresh)
        graph = load_graph(bundle.path(artifact.file))
        return find_first_mismatch(graph, artifact, replay, [tolerances], same_shapes=True)

    wrong = [artifact for artifact in explanations if artifact.id in failed]
    if wrong:
        report = name_nodes(report, wrong, progress, trace, search, lambda artifact, fresh: UNNAMED)
    return report, kept


def compare_weights(bundle: Bundle, artifact: Artifact, tensors: Arrays) -> Comparison:
    """Compare a graph's weights with the checkpoint's."""
    graph = load_graph(bundle.path(artifact.file)).graph
    weights = list(check_weights(graph, tensors, [], is_ours=True))
    faults = [*shorten(find_not_finite(graph)), *shorten(filter(None, weights))]
    return report_reading(artifact.id, CASE, len(weights), faults)


def make_replay(case: ExplanationCase) -> Replay:
    """Return a replay that runs a case's inputs, and compares every value."""

    def drive(program: Program) -> None:
        program.run(case.inputs, {})

    return Replay(drive, (Step(f"case {case.name!r}", np.zeros((0, 0), np.int64)),), ())


def run_cases(
    bundle: Bundle, artifact: Artifact, cases: Sequence[ExplanationCase], progress: Progress
) -> Iterator[tuple[ExplanationCase, Comparison]]:
    """Run a graph on ONNX Runtime, and yield each case with its comparison."""
    backend = OrtCpuBackend(spinning=False)
    try:
        program = backend.open(bundle, artifact)
    except BackendError as error:
        for case in cases[:1]:
            yield case, Comparison.from_error(artifact.id, backend.name, "opening it", error)
        return
    with closing(program):
        for number, case in enumerate(cases):
            progress(CountedLine(f"verifying {artifact.id}: {case.name}", number, len(cases), "cases"))
            yield case, run_case(program, artifact, case, backend.name)


def run_case(program: Program, artifact: Artifact, case: ExplanationCase, backend: str) -> Comparison:
    """Run a graph on a case, and compare each of its results in units of its own spread."""
    try:
        results = program.run(case.inputs, {})
    except BackendError as error:
        return Comparison.from_error(artifact.id, backend, case.name, error)
    errors: dict[str, float] = {}
    failures = []
    for name, want in case.outputs.items():
        got = results[name]
        if name in INTEGERS:
            if wrong := count_wrong(name, got, want, case):
                failures.append(f"{name}: {wrong} of {got.size} are not PyTorch's")
            continue
        if case.chosen is not None:
            got = choose_values(got, case.chosen)
        # Of logits the unit is 1 where their spread is less: one alone may be near zero.
        is_logit = name == "score" and not case.inputs["objective"].any()
        errors[name] = measure_distance(got, want, 1.0 if is_logit else SMALLEST)
        if not errors[name] <= case.limits[name]:
            failures.append(f"{name}: max_error {errors[name]:.3g} > {case.limits[name]:.3g}")
    worst = max(errors, key=lambda name: errors[name] / case.limits[name])
    return Comparison(
        {"max_error": errors[worst]},
        {"max_error": case.limits[worst]},
        tuple(failures[:3]),
        artifact=artifact.id,
        backend=backend,
        case=case.name,
    )


def count_wrong(name: str, got: Array, want: Array, case: ExplanationCase) -> int:
    """Return how many ranks, or likeliest tokens, differ by more than rounding may change."""
    if got.shape != want.shape:
        return got.size
    if name == "likeliest":
        return int(((want >= 0) & (got != want)).sum())
    return int(((got < want) | (got > case.highest.get(name, want))).sum())


def choose_values(array: Array, most: int) -> Array:
    """Return at most so many of an array's values, evenly chosen."""
    return array.reshape(-1)[list(choose_evenly(array.size, most))]


def keep_cases(folder: Path, cases: Mapping[str, Sequence[ExplanationCase]]) -> None:
    """Write cases, by their graphs' ids, below a bundle's folder: some of PyTorch's values, and limits."""
    arrays: dict[str, Array] = {}
    limits: dict[str, Mapping[str, float]] = {}
    for artifact, own in cases.items():
        for case in own:
            limits[f"{artifact}/{case.name}"] = case.limits
            for side, parts in list_sides(case).items():
                arrays |= {f"{artifact}/{case.name}/{side}/{key}": array for key, array in parts.items()}
    (folder / "checks").mkdir(exist_ok=True)
    path = folder / f"{PREFIX.rstrip('-')}.npz"
    write_golden(path, arrays, limits)
    name_by_content(path)


def list_sides(case: ExplanationCase) -> dict[str, Arrays]:
    """Return the arrays of a case to keep, by their meaning."""
    inputs = {key: array for key, array in case.inputs.items() if not case.ids or key not in REMADE}
    outputs = {
        key: array if key in INTEGERS else choose_values(array, KEPT_VALUES)
        for key, array in case.outputs.items()
    }
    scale = {"embeddings": np.array(case.scale)}
    return {"input": inputs, "output": outputs, "highest": case.highest, "ids": case.ids, "scale": scale}


def read_cases(path: Path) -> dict[str, list[ExplanationCase]]:
    """Return the cases that `keep_cases` wrote, by their graphs' ids."""
    arrays, limits = read_golden(path)
    sides: dict[str, dict[str, Array]] = defaultdict(dict)
    for key, array in arrays.items():
        side, _, name = key.rpartition("/")
        sides[side][name] = array
    cases: dict[str, list[ExplanationCase]] = {}
    for label, own in limits.items():
        artifact, name = label.split("/")
        inputs, outputs, highest, ids = (sides[f"{label}/{s}"] for s in ("input", "output", "highest", "ids"))
        scale = float(sides[f"{label}/scale"]["embeddings"])
        case = ExplanationCase(name, inputs, outputs, own, highest, ids, scale, chosen=KEPT_VALUES)
        cases.setdefault(artifact, []).append(case)
    return cases


def verify_kept_explanations(
    report: VerificationReport, bundle: Bundle, progress: Progress
) -> VerificationReport:
    """Return the report with the graphs that explain the model, compared with PyTorch's results at export.

    The first is the one that gives what others read.
    """
    if not bundle.manifest.explanations:
        return report
    names = [name for name in bundle.manifest.files if name.startswith(PREFIX)]
    if not names:
        raise VerificationError(
            f"{bundle.folder} has graphs for `explain`, but nothing to compare them with; pass --source"
            f" {name_checkpoint(bundle)}"
        )
    every = Bundle.open(bundle.folder).manifest.explanations  # also where only one of them is to be compared
    layers = next(artifact for artifact in every if artifact.graph == LAYERS)
    with name_damage(bundle):
        cases = read_cases(bundle.path(names[0]))
        compared = [comparison for _, comparison in run_cases(bundle, layers, cases[layers.id], progress)]
        is_wrong = not all(comparison.passed for comparison in compared)
        for artifact in bundle.manifest.explanations:
            if artifact.id == layers.id:
                continue
            if is_wrong:
                error = BackendError(f"what it reads comes from {layers.id}, which is wrong")
                what = "what layers gives"
                compared.append(Comparison.from_error(artifact.id, OrtCpuBackend.name, what, error))
                continue
            remade = remake_inputs(bundle, layers, artifact, cases[artifact.id])
            compared += [comparison for _, comparison in run_cases(bundle, artifact, remade, progress)]
    return dataclasses.replace(report, comparisons=(*report.comparisons, *compared))


def remake_inputs(
    bundle: Bundle, layers: Artifact, artifact: Artifact, cases: Sequence[ExplanationCase]
) -> list[ExplanationCase]:
    """Return a graph's cases with the embeddings, or hidden states, that `layers` computes by their ids."""
    remade = []
    with closing(OrtCpuBackend(spinning=False).open(bundle, layers)) as program:
        for case in cases:
            inside = read_inside(artifact.inputs, program.run(case.ids, {}), case.scale)
            remade.append(dataclasses.replace(case, inputs={**case.inputs, **inside}))
    return remade
