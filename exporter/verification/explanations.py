"""Verifies the graphs that explain a model, and names the node at fault in one that fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.metrics import Comparison
from ...runtime.backends.backend import Program
from ...runtime.bundle.bundle import Bundle
from ...runtime.errors import PlanForgeError
from ..execution.replay import Replay, Step
from ..passes.weight_files import load_graph
from ..reference_model import is_module, restore_weights
from ..tasks.base import Progress
from ..tasks.explanation import ExplanationCase, JudgedGraphs, compare_explanations
from ..tasks.kept_explanations import compare_kept
from ..tracing.recipes import Recipe
from .bisect import FirstMismatch, find_first_mismatch, make_node_tolerances
from .explain import Tracer
from .finite import find_not_finite
from .reading import list_tensors_to_compare
from .report import VerificationReport
from .structure import CASE, check_weights, report_reading, shorten

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel

UNNAMED = "every node of it is within its tolerance in the case that failed: small errors may add up"


def verify_explanations(
    report: VerificationReport,
    bundle: Bundle,
    model: ReferenceModel,
    recipes: Mapping[str, Recipe],
    trace: Tracer,
    seed: int,
    progress: Progress,
) -> tuple[VerificationReport, JudgedGraphs]:
    """Return the report with the graphs that explain the model, compared with PyTorch, and their cases."""
    if not bundle.manifest.explanations:
        return report, JudgedGraphs([], {}, {})
    assert is_module(model)
    restore_weights(model)
    tensors = list_tensors_to_compare(bundle, model)
    comparisons = []
    for artifact in bundle.manifest.explanations:
        graph = load_graph(bundle.path(artifact.file)).graph
        weights = list(check_weights(graph, tensors, [], is_ours=True))
        faults = [*shorten(find_not_finite(graph)), *shorten(filter(None, weights))]
        comparisons.append(report_reading(artifact.id, CASE, len(weights), faults))
    judged = compare_explanations(bundle, model, recipes, seed, progress)
    culprits, unexplained = find_culprits(bundle, judged.failed, trace, progress)
    report = dataclasses.replace(
        report,
        comparisons=(*report.comparisons, *comparisons, *judged.comparisons),
        culprits=(*report.culprits, *culprits),
        unexplained={**report.unexplained, **unexplained},
    )
    return report, judged


def verify_kept_explanations(
    report: VerificationReport, bundle: Bundle, progress: Progress
) -> VerificationReport:
    """Return the report with the graphs that explain the model, compared with what PyTorch said at export."""
    if not bundle.manifest.explanations:
        return report
    compared: list[Comparison] = compare_kept(bundle, progress)
    return dataclasses.replace(report, comparisons=(*report.comparisons, *compared))


def find_culprits(
    bundle: Bundle, failed: Mapping[str, ExplanationCase], trace: Tracer, progress: Progress
) -> tuple[list[FirstMismatch], dict[str, str]]:
    """Return the first wrong node of each graph that failed, and why there is none of others."""
    if not failed:
        return [], {}
    artifacts = {artifact.id: artifact for artifact in bundle.manifest.explanations}
    culprits = []
    unexplained = {}
    names = [artifacts[name].recipe_id for name in failed]
    progress(f"tracing {', '.join(names)} again, to find the nodes at fault")
    try:
        healthy = trace(names)
    except PlanForgeError as error:  # the verdict stands without
        return [], {name: f"no node can be named: {error}" for name in failed}
    for name, case in failed.items():
        artifact = artifacts[name]
        replay = make_replay(case)
        tolerances = make_node_tolerances(
            replay, artifact, healthy[artifact.recipe_id], artifact, healthy[artifact.recipe_id]
        )
        try:
            graph = load_graph(bundle.path(artifact.file))
            mismatch = find_first_mismatch(graph, artifact, replay, [tolerances], same_shapes=True)
        except (PlanForgeError, ValueError) as error:
            unexplained[name] = f"no node can be named: {error}"
            continue
        if mismatch is None:
            unexplained[name] = UNNAMED
        else:
            culprits.append(mismatch)
    return culprits, unexplained


def make_replay(case: ExplanationCase) -> Replay:
    """Return a replay that runs a case's inputs; of all its values every one is compared."""

    def drive(program: Program) -> None:
        program.run(case.inputs, {})

    return Replay(drive, (Step(f"case {case.name!r}", np.zeros((0, 0), np.int64)),), ())
