"""Applies every lint rule to every graph, for every target."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ...runtime.backends.dialects import PLANS_ONLY
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact, Manifest
from ...runtime.errors import InputError
from ..checkpoints.source import suggest_export
from ..targets import Target, find_target_of_plan, find_targets
from ..tensorrt_versions import Version
from ..tracing.modules import find_module
from .all_rules import RULES
from .cuda_rules import Placement, count_placement
from .model import LintModel
from .report import CUDA, Finding, LintReport
from .rule import SEVERITIES, Hit, Rule

if TYPE_CHECKING:
    import onnx_ir as ir

SharedHits: TypeAlias = dict[tuple[str, object], tuple[Hit, ...]]


def lint(path: str | Path, targets: Sequence[str] = ()) -> LintReport:
    """Tell before a long build what will fail or be wrong, and how to fix it. No weights are read.

    Args:
        path: an .onnx file, or a bundle's folder. Each graph of a bundle is checked for the targets that take
            it; where a target takes none, all are checked for it.
        targets: of `TARGETS`; unless given, those that a bundle was made for, and all for a file.

    Raises:
        InputError: there is no such file or target, or it is not ONNX.
        BundleError: the folder is not a bundle.
    """
    path = Path(path)
    left_out: dict[str, str] = {}
    if path.is_dir():
        bundle = Bundle.open(path)
        artifacts = bundle.manifest.artifacts
        if not artifacts:
            raise InputError(f"{path} is a bundle without a graph; export it again")
        kinds = {artifact.file: artifact.graph for artifact in artifacts}
        files = {name: bundle.locate(name) for name in kinds}
        chosen = find_targets(targets or list_bundle_targets(bundle.manifest))
        taken = {target: {a.file for a in choose_graphs(target, artifacts)} for target in chosen}
        if targets:
            left_out = explain_left_out(artifacts, taken)
    elif path.exists():
        kinds = {path.name: ""}
        files = {path.name: path}
        chosen = find_targets(targets)
        taken = {target: {path.name} for target in chosen}
    else:
        raise InputError(
            f"{path} does not exist; give an .onnx file, or the folder that `planforge export` wrote"
            f"{suggest_export(str(path), 'lint')}"
        )
    checked: list[tuple[str, str]] = []
    findings: list[Finding] = []
    placements: dict[str, Placement] = {}
    for name, file in files.items():
        models: dict[Version | None, tuple[LintModel, SharedHits]] = {}  # by what `build` rewrites them for
        for target in chosen:
            if name in taken[target]:
                rewritten = target.version if path.is_dir() and target.older_than(10) else None
                if rewritten not in models:
                    models[rewritten] = (LintModel.load(file, path.is_dir(), rewritten), {})
                checked.append((name, target.name))
                findings += check_graph(models[rewritten][0], name, target, models[rewritten][1])
                if target.name == CUDA:
                    placements[name] = count_placement(models[rewritten][0])
    names = tuple(target.name for target in chosen)
    return LintReport(path, kinds, names, tuple(checked), tuple(findings), placements, left_out)


def explain_left_out(
    artifacts: Sequence[Artifact], taken: Mapping[Target, Collection[str]]
) -> dict[str, str]:
    """Return why a bundle's graphs are not checked for a target: reasons in words, by the graph's file."""
    told: dict[str, dict[str, list[str]]] = {}
    for target, files in taken.items():
        for artifact in artifacts:
            if artifact.file not in files:
                why = explain_not_taken(target, artifact, artifacts)
                told.setdefault(artifact.file, {}).setdefault(why, []).append(target.name)
    return {
        file: "; ".join(f"for {' and '.join(names)} {why}" for why, names in reasons.items())
        for file, reasons in told.items()
    }


def explain_not_taken(target: Target, artifact: Artifact, artifacts: Sequence[Artifact]) -> str:
    """Return why a target does not take a graph of a bundle's, in words that follow "for" and its name."""
    wanted = target.find_dialect(artifact.keeps_cache, artifact.precision)
    if artifact.dialect not in (wanted, "portable"):
        other = "" if wanted == "portable" else ", or else 'portable',"
        return f"the dialect {wanted!r}{other} is taken, not {artifact.dialect!r}"
    is_other = artifact.dialect != wanted and artifact.precision not in target.without
    if is_other and is_exported_for(target, artifact, artifacts):
        return f"the same graph in the dialect {wanted!r} is taken"
    return f"{artifact.precision} is of no use, as other precisions are faster there"


def is_exported_for(target: Target, artifact: Artifact, artifacts: Sequence[Artifact]) -> bool:
    """Tell whether a bundle has a graph in the dialect that a target takes it in."""
    wanted = target.find_dialect(artifact.keeps_cache, artifact.precision)
    found = {(a.graph, a.precision) for a in artifacts if a.dialect == wanted}
    return (artifact.graph, artifact.precision) in found


def list_bundle_targets(manifest: Manifest) -> list[str]:
    """Return the targets that a bundle's graphs and plans are for."""
    plans = [find_target_of_plan(plan.engine, plan.version).name for plan in manifest.plans]
    graphs = [name for artifact in manifest.artifacts for name in list_graph_targets(artifact)]
    return list(dict.fromkeys(plans + graphs))


def list_graph_targets(artifact: Artifact) -> tuple[str, ...]:
    """Return the targets of a single graph: those that take its dialect and precision, or build a plan of it.

    An encoder has no cache, so its portable graph is what rtx's plan is built from too.
    """
    if artifact.dialect == "ort":
        return ("cuda",) if artifact.is_half else ("cpu",)
    if artifact.dialect == "inplace":
        return ("rtx",)
    if not artifact.keeps_cache and artifact.is_half:
        return "portable", "rtx"
    return ("portable",)


def choose_graphs(target: Target, artifacts: Sequence[Artifact]) -> list[Artifact]:
    """Return a bundle's graphs that a target takes; of a kind that it takes none of, such as "decoder", all.

    Without a graph in the target's dialect, it is the portable one.
    """
    chosen: list[Artifact] = []
    for kind in dict.fromkeys(artifact.graph for artifact in artifacts):
        same_kind = [artifact for artifact in artifacts if artifact.graph == kind]
        taken = [artifact for artifact in same_kind if takes(target, artifact, artifacts)]
        chosen += taken or [a for a in same_kind if a.dialect == "portable"] or same_kind
    return chosen


def takes(target: Target, artifact: Artifact, artifacts: Sequence[Artifact]) -> bool:
    """Tell whether a target takes a graph of a bundle's.

    ONNX Runtime runs the portable graph of a precision that has no other: one in fp16 on a GPU alone.
    """
    if artifact.precision in target.without:
        return False
    if artifact.dialect == target.find_dialect(artifact.keeps_cache, artifact.precision):
        return True
    if artifact.dialect != "portable" or target.plans or is_exported_for(target, artifact, artifacts):
        return False
    return artifact.precision not in PLANS_ONLY and (target.on_gpu or not artifact.is_half)


def check_graph(model: LintModel, name: str, target: Target, shared: SharedHits) -> list[Finding]:
    """Return a graph's findings for one target, errors first; a fault of many nodes is one finding.

    `shared` has the hits of rules that find the same for other targets; this adds to it.
    """
    groups: dict[tuple[Rule, str, Hit], list[Hit]] = {}
    for rule in RULES:
        if rule.holds(target):
            key = (rule.id, target.plans if rule.alike else target.name)
            if key not in shared:
                shared[key] = tuple(rule.check(model, target))
            for hit in shared[key]:
                operator = "" if hit.node is None else hit.node.op_type
                fault = Hit(hit.what, severity=hit.severity, fix=hit.fix, source=hit.source)
                groups.setdefault((rule, operator, fault), []).append(hit)
    findings = [
        Finding(
            graph=name,
            target=target.name,
            severity=fault.severity or rule.severity,
            rule=rule.id,
            operator=operator,
            nodes=tuple(dict.fromkeys(name_node(hit.node) for hit in hits if hit.node is not None)),
            tensors=tuple(dict.fromkeys(hit.tensor for hit in hits if hit.tensor)),
            what=fault.what,
            fix=fault.fix or rule.fix,
            source=fault.source or rule.source,
            modules=tuple(dict.fromkeys(path for hit in hits if (path := find_path(hit.node)))),
        )
        for (rule, operator, fault), hits in groups.items()
    ]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def find_path(node: ir.Node | None) -> str:
    """Return the path of a node's module in PyTorch; "" where none is known."""
    return "" if node is None else find_module(node)


def name_node(node: ir.Node) -> str:
    """Return a node's name, or what it computes if it has none."""
    outputs = [str(value.name) for value in node.outputs if value.name]
    return str(node.name or "") or f"-> {', '.join(outputs[:2])}"
