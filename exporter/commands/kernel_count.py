"""Counts the nodes of a graph that no kernel of ONNX Runtime on a GPU takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...runtime.errors import InputError


@dataclass(frozen=True)
class KernelCount:
    """A graph's nodes, and those of them that no kernel of ONNX Runtime on a GPU takes, by operator."""

    nodes: int
    without: Mapping[str, int]


def count_kernels(path: Path) -> KernelCount | None:
    """Count a graph's nodes by the table of kernels; None where lint cannot read it."""
    from ..linting.cuda_rules import list_without_kernel
    from ..linting.model import LintModel

    try:
        model = LintModel.load(path, in_bundle=False)
    except InputError:  # as `planforge lint` says; what can be read is shown here
        return None
    without = Counter(operator for _, operator, _ in list_without_kernel(model))
    return KernelCount(len(list(model.nodes)), dict(without))


def describe_kernels(counted: KernelCount) -> tuple[str, str]:
    """Return a count in two cells of a table."""
    parts = [f"{count} x {operator}" for operator, count in counted.without.items()]
    return str(counted.nodes), ", ".join(parts) or "none"
