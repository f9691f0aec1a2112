"""Finds the graphs that plans are built from."""

from __future__ import annotations

from collections.abc import Sequence

from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.export_again import TARGETS, suggest_export_again
from ...runtime.bundle.manifest import Artifact
from ...runtime.errors import InputError


def find_plan_graphs(bundle: Bundle, dialect: str) -> list[Artifact]:
    """Return the graphs of a bundle that plans are built from; refuse a bundle that has none."""
    artifacts = bundle.manifest.artifacts
    is_imported = bool(bundle.manifest.source.get("exporter"))
    dialect = "portable" if is_imported else dialect
    if found := list_plan_graphs(artifacts, dialect):
        return found
    halves = {(a.graph, a.dialect) for a in artifacts if a.is_half}
    wanted = {a.graph: choose_dialect(a, dialect) for a in artifacts}
    missing = next((graph for graph, own in wanted.items() if (graph, own) not in halves), next(iter(wanted)))
    again = suggest_export_again(bundle, precisions=["fp16"], targets=[TARGETS[dialect]])
    raise InputError(f"the bundle has no fp16 {missing} graph in the {wanted[missing]} dialect; {again}")


def list_plan_graphs(artifacts: Sequence[Artifact], dialect: str) -> list[Artifact]:
    """Return the graphs that plans are built from: all that compute in fp16, precision by precision.

    `dialect` is the target's, or "portable" where another exporter made the graphs.
    """
    names = {a.graph for a in artifacts}
    matching = [a for a in artifacts if a.is_half and a.dialect == choose_dialect(a, dialect)]
    groups = group_by_precision(matching)
    return [a for group in groups if {a.graph for a in group} == names for a in group]


def choose_dialect(artifact: Artifact, dialect: str) -> str:
    """Return the dialect of a graph that plans are built from: of encoders the portable one."""
    return dialect if artifact.keeps_cache else "portable"


def group_by_precision(graphs: Sequence[Artifact]) -> list[list[Artifact]]:
    """Return the graphs of each precision."""
    precisions = dict.fromkeys(graph.precision for graph in graphs)
    return [[graph for graph in graphs if graph.precision == precision] for precision in precisions]
