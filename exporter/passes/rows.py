"""Computes the end of a decoder only for the rows that are asked for.

N rows, B batch, T tokens, E width
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .weights import add_initializer, find_weight

ROWS = "logit_rows"  # the input (N,) that chooses
# Operators whose result in a row depends on that row of their inputs alone.
ELEMENTWISE = ("Add", "Mul", "Relu", "Tanh", "Sigmoid", "Gelu", "FastGelu", "BiasGelu")
BY_ROW = (*ELEMENTWISE, "LayerNormalization", "SkipLayerNormalization")


class GatherRowsEarly(ir.passes.InPlacePass):
    """Moves the choice of the head's rows up to the last attention: of a long prompt one row is wanted.

    Behind it the last layer's projections, norms and feed-forward part see N rows instead of B * T.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        rows = next((value for value in graph.inputs if value.name == ROWS), None)
        if rows is None:
            return ir.passes.PassResult(model, modified=False)
        (unsqueeze,) = (node for node, _ in rows.uses())
        (choice,) = (node for node, _ in unsqueeze.outputs[0].uses())  # GatherND
        flat = choice.inputs[0]
        assert flat is not None
        flatten = flat.producer()
        assert flatten is not None and flatten.inputs[0] is not None
        last = flatten.inputs[0]  # (B, T, E)
        late = find_late_nodes(last, flatten)
        count = choice.outputs[0].shape[0] if choice.outputs[0].shape is not None else None
        chosen: dict[ir.Value, ir.Value] = {}
        for node in [node for node in graph if node in late]:
            for index, value in enumerate(node.inputs):
                if value is None or value.shape is None or len(value.shape) != 3 or value.producer() in late:
                    continue
                if value not in chosen:
                    chosen[value] = gather_rows(graph, node, value, rows, count)
                node.replace_input_with(index, chosen[value])
            for output in node.outputs:
                if output.shape is not None:
                    output.shape = ir.Shape([count, output.shape[-1]])
        if late:
            ir.convenience.replace_all_uses_with(choice.outputs[0], last)
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=bool(late))


def find_late_nodes(last: ir.Value, reader: ir.Node) -> set[ir.Node]:
    """Return the nodes that compute `last` row by row, as far up as `reader` alone needs all of them.

    Whoever reads an output of the graph needs all of its rows, so no node that makes one is among them.
    """
    late: set[ir.Node] = set()
    waiting = [last]
    while waiting:
        node = waiting.pop().producer()
        if node is None or node in late or not is_by_row(node):
            continue
        if any(output.is_graph_output() for output in node.outputs):
            continue
        users = {user for output in node.outputs for user, _ in output.uses()}
        if users <= late | {reader}:
            late.add(node)
            waiting += [value for value in node.inputs if value is not None]
    return late


def is_by_row(node: ir.Node) -> bool:
    return node.op_type in BY_ROW or (node.op_type == "MatMul" and find_weight(node) is not None)


def gather_rows(
    graph: ir.Graph, reader: ir.Node, value: ir.Value, rows: ir.Value, count: int | ir.SymbolicDim | None
) -> ir.Value:
    """Return the chosen rows (N, X) of a value (B, T, X), computed before `reader`."""
    width = value.shape[-1] if value.shape is not None else None
    assert isinstance(width, int)
    target = add_initializer(graph, f"flat.{width}", ir.tensor(np.array([-1, width]), name=f"flat.{width}"))
    flat = ir.node("Reshape", [value, target], name=f"{value.name}.flat")
    chosen = ir.node("Gather", [flat.outputs[0], rows], {"axis": 0}, name=f"{value.name}.rows")
    for node in (flat, chosen):
        node.outputs[0].name = node.name
        node.outputs[0].type = value.type
    chosen.outputs[0].shape = ir.Shape([count, width])
    graph.insert_before(reader, [flat, chosen])
    return chosen.outputs[0]
