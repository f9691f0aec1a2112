"""Find the nodes at fault in the graphs that failed."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import onnx_ir as ir

from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact, Manifest
from ...runtime.errors import PlanForgeError
from ..calibration.calibration import Calibration
from ..calibration.convert import converted
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.source import Source
from ..comparison.examiners import examiner_of
from ..execution.trial import Trial
from ..graphs import attach_weights, in_fp32, recipe_of
from ..passes.weight_files import load_graph
from ..precisions import PRECISIONS
from ..reference.fitted_head import HEAD
from .bisect import Culprit, Witnesses, find_culprit, module_bands, node_bands
from .report import VerificationReport
from .structure import READING
from .witnesses import find_witnesses

if TYPE_CHECKING:
    from ...models.checkpoint import Model

INSIDE = (
    "every node of it is inside its band, in a short padded batch and a step of one token: look at what"
    " feeds it (the cache, the padding), at longer texts, at several tokens on a past, or at small errors"
    " that add up"
)
LOSS = (
    "every node of it is inside its band, so this precision may lose too much of this model on these texts:"
    " leave it out of --precision, or judge it by texts of yours, --prompts FILE; else look at what feeds it"
    " (the cache, the padding), or at longer texts"
)

Progress: TypeAlias = Callable[[str], None]
# Gives healthy graphs with their weights, in fp32, by their recipes' ids.
Tracer: TypeAlias = Callable[[Sequence[str]], Mapping[str, ir.Model]]


def explain(
    bundle: Bundle,
    report: VerificationReport,
    expected: Any,
    progress: Progress,
    model: Model | None = None,
    calibration: Calibration | None = None,
    traced: Tracer | None = None,
) -> VerificationReport:
    """Return the report with the first node at fault in each graph that failed.

    Args:
        bundle: the bundle whose graphs were compared.
        report: the comparisons.
        expected: what they were compared with.
        progress: called with a line when a stage begins.
        model: the model in PyTorch, ours or another exporter's; without it graphs are compared with the
            bundle's own in fp32.
        calibration: how its int8 and int4 numbers were chosen.
        traced: traces the model's graphs.
    """
    failed = failed_artifacts(bundle.manifest, report)
    if not failed:
        return report
    examiner = examiner_of(bundle.manifest)
    full_manifest = Bundle.open(bundle.folder).manifest  # also of graphs that were not asked for
    healthy: Mapping[str, ir.Model] = {}
    if model is not None and traced is not None:
        recipes = list(dict.fromkeys(recipe_of(artifact) for artifact in failed))
        progress(f"tracing {', '.join(recipes)} again, to find the nodes at fault")
        try:
            healthy = traced(recipes)
        except PlanForgeError as error:  # the verdict stands without
            why = f"no node can be named: {error}"
            return dataclasses.replace(report, unexplained={artifact.id: why for artifact in failed})

    def culprit_of(artifact: Artifact) -> Culprit | None:
        graph = load_graph(bundle.path(artifact.file))
        artifact = as_traced(artifact, full_manifest)
        trial = examiner.trial(bundle, artifact, expected)
        if model is not None and calibration is not None and healthy:
            witnesses = witnesses_of(artifact, trial, healthy[recipe_of(artifact)], model, calibration)
        else:
            witnesses = find_witnesses(
                bundle, full_manifest, artifact, graph, trial, failed, expected, model, calibration
            )
        return find_culprit(graph, artifact, trial, witnesses)

    culprits: list[Culprit] = []
    unexplained: dict[str, str] = {}
    read = {c.artifact for c in report.comparisons if c.backend == READING and not c.passed}
    for artifact in failed:
        progress(f"verifying {artifact.id}: looking for the node at fault")
        try:
            culprit = culprit_of(artifact)
        except (PlanForgeError, ValueError) as error:
            unexplained[artifact.id] = f"no node can be named: {error}"
            continue
        if culprit is not None:
            culprits.append(culprit)
        elif artifact.id not in read:  # what was read there names its node
            unexplained[artifact.id] = inside_text(artifact, full_manifest, bool(healthy))
    return dataclasses.replace(report, culprits=tuple(culprits), unexplained=unexplained)


def inside_text(artifact: Artifact, manifest: Manifest, traced: bool) -> str:
    """Return the explanation of a failed graph none of whose nodes left its band."""
    if not PRECISIONS[artifact.precision].is_quantized:
        return INSIDE
    ids = {other.id for other in manifest.artifacts}
    by_nodes = traced or f"{recipe_of(artifact)}.fp32" in ids
    return LOSS if by_nodes else f"{LOSS}; or add fp32 to --precision, which every node is held against"


def as_traced(artifact: Artifact, manifest: Manifest) -> Artifact:
    """Return a graph without the classifier that was fitted to it afterwards."""
    if manifest.encoder is None or manifest.encoder.fitted is None:
        return artifact
    return dataclasses.replace(artifact, outputs=tuple(s for s in artifact.outputs if s.role != HEAD))


def witnesses_of(
    artifact: Artifact, trial: Trial, healthy: ir.Model, model: Model, calibration: Calibration
) -> Witnesses:
    """Return the references: PyTorch, and a healthy graph in fp32 and in the artifact's precision."""
    full_artifact = in_fp32(artifact)
    full = converted(healthy, full_artifact, calibration)
    own = converted(healthy, artifact, calibration)
    return Witnesses(
        node_bands(trial, artifact, full, full_artifact, own),
        module_bands(trial, own, model, calibration.rounding(artifact.precision)),
    )


def failed_artifacts(manifest: Manifest, report: VerificationReport) -> list[Artifact]:
    """Return the graphs that failed, without decoders whose encoder did: what they read is wrong already."""
    names = {comparison.artifact for comparison in report.comparisons if not comparison.passed}
    failed = [artifact for artifact in manifest.artifacts if artifact.id in names]
    encoders = {artifact.precision for artifact in failed if artifact.graph == "encoder"}
    return [a for a in failed if a.graph != "decoder" or a.precision not in encoders]


def tracer_of(manifest: Manifest, source: Source, model: Model) -> Tracer:
    """Return a function that traces a bundle's graphs once more from its checkpoint."""

    def traced(recipes: Sequence[str]) -> dict[str, ir.Model]:
        from ..tracing.onnx_export import trace_recipes

        checkpoint = Checkpoint(source, None, manifest.max_length, read_chosen_outputs(manifest))
        with tempfile.TemporaryDirectory() as folder:
            paths = {recipe: Path(folder) / recipe for recipe in recipes}
            graphs, _ = trace_recipes(source.folder, checkpoint.choices, paths, lambda: None)
        attach_weights(checkpoint, graphs, model)
        return graphs

    return traced


def read_chosen_outputs(manifest: Manifest) -> tuple[str, ...]:
    """Return the `outputs` that were chosen at export."""
    names = [spec.name for artifact in manifest.artifacts for spec in artifact.outputs]
    chosen = [n for n in names if n.startswith("hidden_states.") or n == "pooler_output"]
    chosen += ["cross_attentions" for n in names if n.startswith("cross_attentions.")]
    return tuple(dict.fromkeys(chosen))
