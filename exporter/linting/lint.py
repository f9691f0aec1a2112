"""`lint`: every rule over every graph, for every target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.errors import InputError
from ..targets import Target, lint_targets, planned_target
from .model import LintModel
from .report import Finding, LintReport, sort_findings
from .rule import Hit, Rule
from .rules import RULES

Found: TypeAlias = dict[tuple[str, object], tuple[Hit, ...]]


def lint(path: str | Path, targets: Sequence[str] = ()) -> LintReport:
    """Tell before a long build what will fail or be wrong, and how to fix it. No weights are read.

    Args:
        path: an .onnx file, or a bundle's folder, of which all graphs are read.
        targets: of `TARGETS`; unless given, those that a bundle was made for, and all for a file.

    Raises:
        InputError: there is no such file or target, or it is no ONNX.
        BundleError: the folder is no bundle.
    """
    path = Path(path)
    wanted = lint_targets(targets or targets_of_bundle(path))
    names = graphs_of(path)
    findings: list[Finding] = []
    for name in names:
        model = LintModel.load(located(path, name))
        found: Found = {}
        for target in wanted:
            findings += sort_findings(check(model, name, target, found))
    return LintReport(path, names, tuple(target.name for target in wanted), tuple(findings))


def graphs_of(path: Path) -> tuple[str, ...]:
    """Return the name of a file, or those of a bundle's graphs."""
    if path.is_dir():
        names = dict.fromkeys(artifact.file for artifact in Bundle.open(path).manifest.artifacts)
        if not names:
            raise InputError(f"{path} is a bundle without a graph")
        return tuple(names)
    if not path.exists():
        raise InputError(f"{path} does not exist")
    return (path.name,)


def targets_of_bundle(path: Path) -> list[str]:
    """Return the targets that a bundle's graphs and plans are for; none where `path` is no folder."""
    if not path.is_dir():
        return []
    manifest = Bundle.open(path).manifest
    plans = [planned_target(plan.engine, plan.version).name for plan in manifest.plans]
    graphs = [name for artifact in manifest.artifacts for name in graph_targets(artifact)]
    return list(dict.fromkeys(plans + graphs))


def graph_targets(artifact: Artifact) -> tuple[str, ...]:
    """Return the targets of a graph alone: who takes its dialect and precision, or would build a plan of it.

    An encoder has no cache, so its portable graph is what rtx's plan is built from too.
    """
    if artifact.dialect == "ort":
        return ("cuda",) if artifact.precision == "fp16" else ("cpu",)
    if artifact.dialect == "inplace":
        return ("rtx",)
    if artifact.graph == "encoder" and artifact.precision == "fp16":
        return "portable", "rtx"
    return ("portable",)


def located(path: Path, name: str) -> Path:
    """Return the file of a graph of a bundle, which the bundle must list and hold itself; else `path`."""
    return Bundle.open(path).locate(name) if path.is_dir() else path


def check(model: LintModel, name: str, target: Target, found: Found) -> list[Finding]:
    """Return what one graph breaks of one target's rules: the same fault of many nodes is one finding.

    Args:
        found: the hits of rules that find the same for other targets; this adds to it.
    """
    groups: dict[tuple[Rule, str, Hit], list[Hit]] = {}
    for rule in RULES:
        if rule.holds(target):
            key = (rule.id, target.plans if rule.alike else target.name)
            if key not in found:
                found[key] = tuple(rule.check(model, target))
            for hit in found[key]:
                operator = "" if hit.node is None else hit.node.op_type
                same = Hit(hit.what, severity=hit.severity, fix=hit.fix, source=hit.source)
                groups.setdefault((rule, operator, same), []).append(hit)
    return [
        Finding(
            graph=name,
            target=target.name,
            severity=same.severity or rule.severity,
            rule=rule.id,
            operator=operator,
            nodes=tuple(dict.fromkeys(node_name(hit) for hit in hits if hit.node is not None)),
            tensors=tuple(dict.fromkeys(hit.tensor for hit in hits if hit.tensor)),
            what=same.what,
            fix=same.fix or rule.fix,
            source=same.source or rule.source,
        )
        for (rule, operator, same), hits in groups.items()
    ]


def node_name(hit: Hit) -> str:
    """Return a node's name, or what it computes if it has none."""
    assert hit.node is not None
    outputs = [str(value.name) for value in hit.node.outputs if value.name]
    return str(hit.node.name or "") or f"-> {', '.join(outputs[:2])}"
