"""Checks after export that a graph's inputs, outputs, types and axes are the recipe's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...runtime.bundle.manifest import TensorSpec
from ..axis_lengths import compute_length
from ..errors import ExportError

if TYPE_CHECKING:
    import onnx_ir as ir


def name_axes(model: ir.Model, outputs: Sequence[TensorSpec], example: Mapping[str, int]) -> None:
    """Rename output axes that tracing named by how they are computed, as "past + tokens" is the total.

    Args:
        model: the traced graph.
        outputs: those of the recipe, whose axes have the names to give.
        example: the lengths while tracing, by the names of axes; no two are alike.
    """
    import onnx_ir as ir

    lengths = {name: length for name, length in example.items() if isinstance(name, str)}
    for value, spec in zip(model.graph.outputs, outputs, strict=False):  # check_graph compares their number
        if value.shape is None or len(value.shape) != len(spec.axis_names()):
            continue
        computed = [compute_length(read_axis_name(dim), lengths) for dim in value.shape]
        value.shape = ir.Shape(
            name if length is not None and length == lengths.get(str(name)) else dim
            for dim, name, length in zip(value.shape, spec.axis_names(), computed, strict=True)
        )


def check_graph(model: ir.Model, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Refuse a graph whose inputs and outputs are not the recipe's, or with inputs that no node uses."""
    graph = model.graph
    problems = compare_specs("input", graph.inputs, inputs) + compare_specs("output", graph.outputs, outputs)
    problems += [
        f"input {value.name!r} is used by no node"
        for value in graph.inputs
        if not value.uses() and not value.is_graph_output()
    ]
    if problems:
        raise ExportError("the exported graph is not the expected one:\n  " + "\n  ".join(problems))


def compare_specs(side: str, values: Sequence[ir.Value], specs: Sequence[TensorSpec]) -> list[str]:
    names = [value.name for value in values]
    expected = [spec.name for spec in specs]
    if names != expected:
        return [f"{side}s are {names}, expected {expected}"]
    problems = []
    for value, spec in zip(values, specs, strict=True):
        dtype = None if value.dtype is None else value.dtype.numpy().name
        if dtype != spec.dtype:
            problems.append(f"{side} {spec.name} is {dtype}, expected {spec.dtype}")
        axes = None if value.shape is None else tuple(read_axis_name(dim) for dim in value.shape)
        if axes != spec.axis_names():
            problems.append(f"{side} {spec.name} has axes {axes}, expected {spec.axis_names()}")
    return problems


def read_axis_name(dim: int | ir.SymbolicDim) -> str | int | None:
    return dim if isinstance(dim, int) else dim.value
