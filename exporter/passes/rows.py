"""Computes the end of a decoder only for the rows that are asked for.

N rows, B batch, T tokens, E width
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .build import Builder
from .weights import find_weight

ROWS = "logit_rows"  # the input (N,) that chooses
# Operators whose result in a row depends on that row of their inputs alone.
ELEMENTWISE = ("Add", "Mul", "Relu", "Tanh", "Sigmoid", "Gelu", "FastGelu", "BiasGelu", "QuickGelu")
BY_ROW = (*ELEMENTWISE, "LayerNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization")


def gather_rows_early(model: ir.Model) -> None:
    """Move the choice of the head's rows up to the last attention: of a long prompt only one row is needed.

    Behind it the last layer's projections, norms and feed-forward part see N rows instead of B * T.
    """
    graph = model.graph
    rows = next((value for value in graph.inputs if value.name == ROWS), None)
    if rows is None:
        return
    (unsqueeze,) = (node for node, _ in rows.uses())
    (choice,) = (node for node, _ in unsqueeze.outputs[0].uses())  # GatherND
    flat = choice.inputs[0]
    assert flat is not None
    flatten = flat.producer()
    assert flatten is not None and flatten.inputs[0] is not None
    last = flatten.inputs[0]  # (B, T, E)
    late = find_late_nodes(last, flatten)
    if not late:
        return
    count = choice.outputs[0].shape[0] if choice.outputs[0].shape is not None else None
    op = Builder(graph, None, "early_rows")
    chosen: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if node in late]:
        for index, value in enumerate(node.inputs):
            if value is None or value.shape is None or len(value.shape) != 3 or value.producer() in late:
                continue
            if value not in chosen:
                op.before = node
                chosen[value] = gather_rows(op, value, rows, ir.Shape([count, value.shape[-1]]))
            node.replace_input_with(index, chosen[value])
        for output in node.outputs:
            if output.shape is not None:
                output.shape = ir.Shape([count, output.shape[-1]])
    ir.convenience.replace_all_uses_with(choice.outputs[0], last)
    RemoveUnusedNodesPass()(model)


def gather_rows(op: Builder, value: ir.Value, rows: ir.Value, shape: ir.Shape) -> ir.Value:
    """Return the chosen rows of a value (B, T, X), in the shape (N, X)."""
    width = shape[-1]
    assert isinstance(width, int)
    chosen = op("Gather", op("Reshape", value, [-1, width]), rows, axis=0)
    chosen.shape = shape
    return chosen


def find_late_nodes(last: ir.Value, reader: ir.Node) -> set[ir.Node]:
    """Return the nodes that compute `last` row by row, as far up as `reader` alone needs all of them.

    Whoever reads an output of the graph needs all of its rows, so no node that makes one is among them.
    """
    late: set[ir.Node] = set()
    waiting = [last]
    while waiting:
        node = waiting.pop().producer()
        if node is None or node in late or not is_by_row(node) or reads_whole_text(node):
            continue
        if any(output.is_graph_output() for output in node.outputs):
            continue
        users = {user for output in node.outputs for user, _ in output.uses()}
        if users <= late | {reader}:
            late.add(node)
            waiting += [value for value in node.inputs if value is not None]
    return late


def reads_whole_text(node: ir.Node) -> bool:
    """Return whether an input has a row for each text (B, 1, X), which serves all of its tokens."""
    shapes = [value.shape for value in node.inputs if value is not None]
    return any(shape is not None and len(shape) == 3 and shape[1] == 1 for shape in shapes)


def is_by_row(node: ir.Node) -> bool:
    return node.op_type in BY_ROW or (node.op_type == "MatMul" and find_weight(node) is not None)
