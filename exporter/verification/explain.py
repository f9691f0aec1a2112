"""Find the nodes at fault in the graphs that failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import onnx_ir as ir

from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact, Manifest
from ...runtime.errors import PlanForgeError
from ..calibration.calibration import Calibration
from ..calibration.convert import convert_graph
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.source import Source
from ..comparison.tasks import AnyExaminer
from ..execution.trial import Trial
from ..graphs import in_fp32, recipe_of
from ..passes.weight_files import load_graph
from ..precisions import PRECISIONS
from ..reference.fitted_head import HEAD
from ..reference.model import is_module
from .bisect import Culprit, Witnesses, find_culprit, module_bands, node_bands
from .report import VerificationReport
from .structure import READING
from .witnesses import find_witnesses

if TYPE_CHECKING:
    from torch import nn

    from ..reference.model import ReferenceModel

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
    examiner: AnyExaminer,
    report: VerificationReport,
    progress: Progress,
    model: ReferenceModel | None = None,
    calibration: Calibration | None = None,
    trace: Tracer | None = None,
) -> VerificationReport:
    """Return the report with the first node at fault in each graph that failed.

    Args:
        examiner: of the bundle whose graphs were compared.
        report: the comparisons.
        progress: called with a line when a stage begins.
        model: the model in PyTorch, ours or another exporter's; without it graphs are compared with the
            bundle's own in fp32.
        calibration: how its int8 and int4 numbers were chosen.
        trace: traces the model's graphs again.
    """
    bundle = examiner.bundle
    failed = artifacts_to_explain(bundle.manifest, report)
    if not failed:
        return report
    full_manifest = Bundle.open(bundle.folder).manifest  # also of graphs that were not asked for
    healthy: Mapping[str, ir.Model] = {}
    if model is not None and trace is not None:
        recipes = list(dict.fromkeys(recipe_of(artifact) for artifact in failed))
        progress(f"tracing {', '.join(recipes)} again, to find the nodes at fault")
        try:
            healthy = trace(recipes)
        except PlanForgeError as error:  # the verdict stands without
            why = f"no node can be named: {error}"
            return dataclasses.replace(report, unexplained={artifact.id: why for artifact in failed})

    def culprit_of(artifact: Artifact) -> Culprit | None:
        graph = load_graph(bundle.path(artifact.file))
        artifact = as_traced(artifact, full_manifest)
        trial = examiner.trial(artifact)
        if model is not None and calibration is not None and healthy:
            assert is_module(model)
            witnesses = witnesses_of(artifact, trial, healthy[recipe_of(artifact)], model, calibration)
        else:
            sound = [a for a in full_manifest.artifacts if a.precision == "fp32" and a not in failed]
            witnesses = find_witnesses(examiner, artifact, graph, sound, model, calibration)
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
    artifact: Artifact, trial: Trial, healthy: ir.Model, model: nn.Module, calibration: Calibration
) -> Witnesses:
    """Return the references: PyTorch, and a healthy graph in fp32 and in the artifact's precision."""
    full_artifact = in_fp32(artifact)
    full = convert_graph(healthy, full_artifact, calibration)
    own = convert_graph(healthy, artifact, calibration)
    return Witnesses(
        node_bands(trial, artifact, full, full_artifact, own),
        module_bands(trial, own, model, calibration.rounding(artifact.precision)),
    )


def artifacts_to_explain(manifest: Manifest, report: VerificationReport) -> list[Artifact]:
    """Return the graphs that failed, without decoders whose encoder did: what they read is wrong already."""
    failed = report.failed_artifacts(manifest)
    encoders = {artifact.precision for artifact in failed if artifact.graph == "encoder"}
    return [a for a in failed if a.graph != "decoder" or a.precision not in encoders]


def tracer_of(manifest: Manifest, source: Source, model: ReferenceModel | None) -> Tracer:
    """Return a function that traces a bundle's graphs once more from its checkpoint."""

    def trace(recipes: Sequence[str]) -> dict[str, ir.Model]:
        from ..providers import TracedGraphs  # needs what exporting needs, and verifying does not

        checkpoint = Checkpoint(source, None, manifest.max_length, read_chosen_outputs(manifest))
        return TracedGraphs(checkpoint, model).graphs(recipes, lambda _: None)

    return trace


def read_chosen_outputs(manifest: Manifest) -> tuple[str, ...]:
    """Return the `outputs` that were chosen at export."""
    names = [spec.name for artifact in manifest.artifacts for spec in artifact.outputs]
    chosen = [n for n in names if n.startswith("hidden_states.") or n == "pooler_output"]
    chosen += ["cross_attentions" for n in names if n.startswith("cross_attentions.")]
    return tuple(dict.fromkeys(chosen))
