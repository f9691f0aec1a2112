"""Keeps what PyTorch said of a model's explanations in its bundle, and compares the graphs with it.

Embeddings and hidden states are too large to keep: the file has the tokens that they are made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.files import name_damage, read_golden, write_golden
from ...runtime.apps.check.metrics import Comparison
from ...runtime.backends.backend import Array
from ...runtime.backends.ort_backend import OrtCpuBackend
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.export_again import name_checkpoint
from ...runtime.bundle.manifest import Artifact
from ...runtime.errors import BackendError
from ..errors import VerificationError
from .explanation import (
    INTEGERS,
    LAYERS,
    ExplanationCase,
    JudgedGraphs,
    choose_values,
    read_inside,
    run_cases,
)

if TYPE_CHECKING:
    from .base import Progress

PREFIX = "checks/explain-"  # of the file's name
KEPT_NUMBERS = 256  # of each result
SIDES = ("input", "ids", "scale", "output", "highest")


def keep_cases(folder: Path, name: str, judged: JudgedGraphs) -> None:
    """Write the cases that are kept below a bundle's folder: some of PyTorch's values, and their limits."""
    arrays: dict[str, Array] = {}
    limits: dict[str, dict[str, float]] = {}
    for artifact, cases in judged.cases.items():
        for case in filter(lambda case: case.is_kept, cases):
            label = f"{artifact}/{case.name}"
            limits[label] = {key: case.find_limit(key) for key in case.outputs}
            arrays |= {f"{label}/{side}/{key}": array for side, key, array in list_arrays(case)}
    (folder / "checks").mkdir(exist_ok=True)
    write_golden(folder / f"{PREFIX}{name}.npz", arrays, limits)


def list_arrays(case: ExplanationCase) -> Iterator[tuple[str, str, Array]]:
    """Yield the side and name of each array that is kept of a case."""
    remade = ("hidden", "embeddings", "source_embeddings") if case.ids else ()
    for key, array in case.inputs.items():
        if key not in remade:
            yield "input", key, array
    for key, array in case.ids.items():
        yield "ids", key, array
    yield "scale", "embeddings", np.array(case.scale)
    for key, array in case.outputs.items():
        yield "output", key, array if key in INTEGERS else choose_values(array, KEPT_NUMBERS)
    if case.highest_ranks is not None:
        yield "highest", "ranks", case.highest_ranks


def read_cases(path: Path) -> dict[str, list[ExplanationCase]]:
    """Return the cases that `keep_cases` wrote, by their graphs' ids."""
    arrays, limits = read_golden(path)
    cases: dict[str, list[ExplanationCase]] = {}
    for label, wider in limits.items():
        artifact, name = label.split("/")
        sides: dict[str, dict[str, Array]] = {side: {} for side in SIDES}
        for key, array in arrays.items():
            if key.startswith(f"{label}/"):
                _, _, side, output = key.split("/")
                sides[side][output] = array
        case = ExplanationCase(
            name,
            sides["input"],
            sides["output"],
            wider=wider,
            highest_ranks=sides["highest"].get("ranks"),
            ids=sides["ids"],
            scale=float(sides["scale"]["embeddings"]),
            chosen=KEPT_NUMBERS,
        )
        cases.setdefault(artifact, []).append(case)
    return cases


def compare_kept(bundle: Bundle, progress: Progress) -> list[Comparison]:
    """Compare the graphs with what PyTorch said at export, and first the one that gives what others read."""
    names = [name for name in bundle.manifest.files if name.startswith(PREFIX)]
    if not names:
        raise VerificationError(
            f"{bundle.folder} has graphs that explain, and nothing to compare them with; pass --source"
            f" {name_checkpoint(bundle)}"
        )
    every = Bundle.open(bundle.folder).manifest.explanations  # also where only one of them is to be compared
    layers = next(artifact for artifact in every if artifact.graph == LAYERS)
    rest = [artifact for artifact in bundle.manifest.explanations if artifact.id != layers.id]
    with name_damage(bundle):
        cases = read_cases(bundle.path(names[0]))
        compared = [comparison for _, comparison in run_cases(bundle, layers, cases[layers.id], progress)]
        if not all(comparison.passed for comparison in compared):
            error = BackendError(f"what it reads comes from {layers.id}, which is wrong")
            return compared + [
                Comparison.from_error(artifact.id, OrtCpuBackend.name, "what layers gives", error)
                for artifact in rest
            ]
        for artifact in rest:
            remade = remake_inputs(bundle, layers, artifact, cases[artifact.id])
            compared += [comparison for _, comparison in run_cases(bundle, artifact, remade, progress)]
    return compared


def remake_inputs(
    bundle: Bundle, layers: Artifact, artifact: Artifact, cases: Sequence[ExplanationCase]
) -> list[ExplanationCase]:
    """Return a graph's cases with the embeddings, or hidden states, that `layers` gives of their tokens."""
    remade = []
    program = OrtCpuBackend().open(bundle, layers)
    try:
        for case in cases:
            inside = read_inside(artifact.inputs, program.run(case.ids, {}), case.scale)
            remade.append(replace(case, inputs={**case.inputs, **inside}))
    finally:
        program.close()
    return remade
