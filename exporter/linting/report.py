"""The findings of lint, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .rule import SEVERITIES, Severity

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .cuda_rules import Placement

CUDA = "cuda"  # the target of which it is counted where nodes run
SHOWN = 3  # names of a group that a table shows


@dataclass(frozen=True)
class Finding:
    """One fault, and all places of a graph that have it.

    Attributes:
        graph: the file's name.
        target: of the command line.
        severity: "error" fails there, "wrong" builds and computes something else or NaN, "warning" is
            slow, large, or only sometimes wrong.
        rule: its id.
        operator: of the nodes; "" if it is about tensors or the whole graph.
        nodes: the names of all nodes with this fault; one without a name is called by its output.
        tensors: the names of inputs, outputs or weights with this fault.
        what: is wrong, with its numbers.
        fix: what to do.
        source: where that is known from.
        modules: the paths of the nodes' modules in PyTorch, each once, as far as they are known.
    """

    graph: str
    target: str
    severity: Severity
    rule: str
    operator: str
    nodes: tuple[str, ...]
    tensors: tuple[str, ...]
    what: str
    fix: str
    source: str
    modules: tuple[str, ...] = ()

    @property
    def is_error(self) -> bool:
        """Return whether the fault makes the graph unusable on the target as it is."""
        return self.severity != "warning"

    @property
    def where(self) -> str:
        """Return the nodes or tensors, as in '12 nodes: Tan_1, Tan_2, Tan_3, ... of h.0.attn, h.1.attn'."""
        names, kind = (self.nodes, "node") if self.nodes else (self.tensors, "tensor")
        if not names:
            return "the graph"
        shown = list_first(names) + (f" of {list_first(self.modules)}" if self.modules else "")
        return f"{len(names)} {kind}s: {shown}" if len(names) > 1 else shown

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON, with all names."""
        lists = {name: list(value) for name, value in vars(self).items() if isinstance(value, tuple)}
        return {**vars(self), **lists}


def list_first(names: Sequence[str]) -> str:
    """Return the first of some names in a line."""
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


@dataclass(frozen=True)
class LintReport:
    """All findings of a lint run, with the graphs and targets that were checked.

    Attributes:
        path: a graph, or a bundle's folder.
        graphs: what each file that was read is for, such as "decoder", by its name.
        targets: of the command line.
        checked: the graphs and the targets that each was checked for.
        findings: graph by graph, target by target, errors first.
        placements: of the target cuda, where the nodes of each graph run.
        left_out: the graphs that a named target does not take, with the reason in words.
    """

    path: Path
    graphs: Mapping[str, str]
    targets: tuple[str, ...]
    checked: tuple[tuple[str, str], ...]
    findings: tuple[Finding, ...]
    placements: Mapping[str, Placement] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Return whether every target has a graph without errors; of a bundle, one of each kind."""
        return all(self.list_fitting(graph, target) for graph, target in self.checked)

    def list_fitting(self, graph: str, target: str) -> list[str]:
        """Return the graphs of the same kind that have no errors for a target; a bundle may have several."""
        bad = {finding.graph for finding in self.findings if finding.target == target and finding.is_error}
        kind = self.graphs[graph]
        candidates = [other for other, taker in self.checked if taker == target and other not in bad]
        return [other for other in candidates if self.graphs[other] == kind]

    def suggest_other(self, graph: str, target: str) -> str:
        """Return which other graph of a bundle the target takes instead of one with errors; "" if none."""
        fitting = self.list_fitting(graph, target)
        return "" if not fitting or graph in fitting else f"; use {Path(fitting[0]).name}"

    def count_severities(self, graph: str, target: str) -> dict[Severity, int]:
        """Count the findings of each severity."""
        found = [f.severity for f in self.findings if (f.graph, f.target) == (graph, target)]
        return {severity: found.count(severity) for severity in SEVERITIES}

    def find_placement(self, graph: str, target: str) -> Placement | None:
        """Return where a graph's nodes run; None where that is not counted, as on other targets than cuda."""
        return self.placements.get(graph) if target == CUDA else None

    def describe_verdict(self, graph: str, target: str) -> str:
        """Return what was found of a graph for a target, in words."""
        verdict = describe_counts(self.count_severities(graph, target)) + self.suggest_other(graph, target)
        placement = self.find_placement(graph, target)
        return verdict if placement is None else f"{verdict}: {placement.describe()}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        verdicts = [
            {
                "graph": graph,
                "target": target,
                **self.count_severities(graph, target),
                **({"nodes": asdict(nodes)} if (nodes := self.find_placement(graph, target)) else {}),
            }
            for graph, target in self.checked
        ]
        return {
            "path": str(self.path),
            "passed": self.passed,
            "verdicts": verdicts,
            "findings": [finding.to_json() for finding in self.findings],
            "left_out": dict(self.left_out),
        }

    def tables(self) -> list[RenderableType]:
        """Return tables: a row for each graph and target, and a row for each finding."""
        from ...runtime.apps.commands.tables import FittingTable

        rows = [(graph, target, self.describe_verdict(graph, target)) for graph, target in self.checked]
        tables: list[RenderableType] = [FittingTable(str(self.path), ("graph", "target", "verdict"), rows)]
        # A fault that several targets share is told once.
        shared: dict[Finding, list[str]] = {}
        for finding in self.findings:
            same = replace(finding, target="", source="")
            shared.setdefault(same, []).append(finding.target)
        columns = ("severity", "rule", "targets", "where", "what is wrong", "fix")
        found = [
            (f.severity, f.rule, " ".join(targets), describe_place(f, len(self.graphs) > 1), f.what, f.fix)
            for f, targets in shared.items()
        ]
        if found:
            tables.append(FittingTable("", columns, found))
        if self.left_out:
            tables.append("\n".join(f"{graph} was left out: {why}" for graph, why in self.left_out.items()))
        return tables


def describe_place(finding: Finding, with_graph: bool) -> str:
    parts = [finding.graph if with_graph else "", finding.operator, finding.where]
    return ": ".join(part for part in parts if part)


def describe_counts(counts: dict[Severity, int]) -> str:
    """Return the counts as text, as in '2 errors, 1 warning'."""
    words = {"error": "error", "wrong": "wrong result", "warning": "warning"}
    told = [f"{n} {words[kind]}{'s' if n > 1 else ''}" for kind, n in counts.items() if n]
    return ", ".join(told) or "nothing found"
