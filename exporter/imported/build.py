"""Adds nodes to a graph, and computes a few of its values."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common

from ...runtime.backends.backend import Array
from ...runtime.backends.ort_backend import open_plain_session
from ..passes.weights import add_initializer


class Builder:
    """Adds nodes before one of a graph; results are named after `name`."""

    def __init__(self, graph: ir.Graph, before: ir.Node, name: str) -> None:
        self.graph = graph
        self.before = before
        self.name = name
        self.count = 0

    def __call__(
        self, operator: str, *inputs: Any, domain: str = "", results: int = 1, **attributes: Any
    ) -> ir.Value:
        """Add a node, and return its first result.

        An input is a value, None, or a number or an array, which becomes a constant: int64 or float32.
        """
        values = [x if x is None or isinstance(x, ir.Value) else self.add_constant(x) for x in inputs]
        node = ir.node(operator, values, attributes, domain=domain, num_outputs=results)
        self.graph.insert_before(self.before, node)
        for result in node.outputs:
            result.type = infer_type(node)
            result.name = f"{self.name}/{operator}_{self.count}"
            self.count += 1
        node.name = f"{node.outputs[0].name}_node"
        return node.outputs[0]

    def add_constant(self, number: npt.ArrayLike) -> ir.Value:
        """Return a small constant, which is in the graph once."""
        array = np.asarray(number)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        return add_initializer(self.graph, f"constant/{array.dtype}/{array.tolist()}", ir.tensor(array))


def infer_type(node: ir.Node) -> ir.TypeProtocol | None:
    """Return the type of a node's results, for the operators that are used here."""
    if node.op_type == "Shape":
        return ir.TensorType(ir.DataType.INT64)
    if node.op_type == "Cast":
        return ir.TensorType(ir.DataType(node.attributes["to"].as_int()))
    if node.op_type in ("And", "GreaterOrEqual"):
        return ir.TensorType(ir.DataType.BOOL)
    given = node.inputs[1 if node.op_type == "Where" else 0]
    return None if given is None else given.type


def make_example_input(value: ir.Value, past: int) -> Array:
    """Make an array for a decoder's input: one row, one token, two source tokens, `past` cached ones."""
    assert value.shape is not None
    name = str(value.name)
    if name.startswith("past"):
        free = past
    elif name.startswith(("cross", "encoder")):
        free = 2
    else:
        free = 1
    shape = [1, *(axis if isinstance(axis, int) else free for axis in list(value.shape)[1:])]
    return np.ones(shape, np.int64) if value.dtype == ir.DataType.INT64 else np.zeros(shape, np.float32)


def evaluate(
    model: ir.Model, names: Sequence[str], make_inputs: Callable[[ir.Value], Sequence[Array]]
) -> list[list[Array]]:
    """Compute values of a graph on ONNX Runtime, for each run of made inputs: an array per name."""
    asked = model.clone()
    by_name = {str(out.name): out for node in asked.graph for out in node.outputs}
    asked.graph.outputs.clear()
    for name in dict.fromkeys(names):
        by_name[name].type = by_name[name].type or ir.TensorType(ir.DataType.BOOL)
        asked.graph.outputs.append(by_name[name])
    common.RemoveUnusedNodesPass()(asked)
    feeds = {str(value.name): make_inputs(value) for value in asked.graph.inputs if value.uses()}
    drop_unused_inputs(asked.graph)
    with tempfile.TemporaryDirectory(prefix="planforge-import-") as folder:
        path = Path(folder, "asked.onnx")
        ir.save(asked, path, external_data="asked.data")
        session = open_plain_session(path)
        runs = zip(*feeds.values(), strict=True) if feeds else [()]
        return [session.run(list(names), dict(zip(feeds, arrays, strict=True))) for arrays in runs]


def drop_unused_inputs(graph: ir.Graph) -> None:
    for value in [value for value in graph.inputs if not value.uses()]:
        graph.inputs.remove(value)
