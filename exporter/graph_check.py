"""The static check after export: the graph's inputs, outputs, types and axes are the ones meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..runtime.bundle.manifest import TensorSpec
from .errors import ExportError

if TYPE_CHECKING:
    import onnx_ir as ir


def name_axes(model: ir.Model, outputs: Sequence[TensorSpec]) -> None:
    """Gives every dynamic axis of the graph's outputs the name that the recipe means.

    Tracing names them by expressions ("past + tokens"); inputs already carry their names. A length that
    is fixed on one side only is left as it is, for `check_graph` to find.
    """
    import onnx_ir as ir

    for value, spec in zip(model.graph.outputs, outputs, strict=True):
        if value.shape is None or len(value.shape) != len(spec.axes):
            continue
        value.shape = ir.Shape(
            name if isinstance(name, str) and not isinstance(dim, int) else dim
            for dim, name in zip(value.shape, spec.axis_names(), strict=True)
        )


def check_graph(model: ir.Model, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Compares a graph's signature with the recipe's, and looks for weights that went astray.

    Raises:
        ExportError: lists every difference at once.
    """
    graph = model.graph
    problems = compare("input", graph.inputs, inputs) + compare("output", graph.outputs, outputs)
    problems += [
        f"input {value.name!r} is used by no node"
        for value in graph.inputs
        if not value.uses() and not value.is_graph_output()
    ]
    if problems:
        raise ExportError("the exported graph is not the one meant:\n  " + "\n  ".join(problems))


def compare(side: str, values: Sequence[ir.Value], specs: Sequence[TensorSpec]) -> list[str]:
    names, meant = [value.name for value in values], [spec.name for spec in specs]
    if names != meant:
        return [f"{side}s are {names}, meant are {meant}"]
    problems = []
    for value, spec in zip(values, specs, strict=True):
        dtype = None if value.dtype is None else value.dtype.numpy().name
        if dtype != spec.dtype:
            problems.append(f"{side} {spec.name} is {dtype}, meant is {spec.dtype}")
        axes = None if value.shape is None else tuple(axis_name(dim) for dim in value.shape)
        if axes != spec.axis_names():
            problems.append(f"{side} {spec.name} has axes {axes}, meant are {spec.axis_names()}")
    return problems


def axis_name(dim: int | ir.SymbolicDim) -> str | int | None:
    return dim if isinstance(dim, int) else dim.value
