"""Splits large tables that an embedding and the head share, which are stored once and read piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .weights import Weight, add_rows, find_weight

# ONNX Runtime packs a MatMul's weight into memory of its own while it opens a graph, and lets go of the
# original after that. In pieces, only one of them is there twice at a time.
PARTS = 8
SPLIT_FROM_ROWS = 16384


def split_shared_table(model: ir.Model) -> None:
    """Multiply by the rows of a large table as they lie in the weights file, some of them at a time."""
    graph = model.graph
    for node in list(graph):
        x = node.inputs[0] if node.inputs else None
        is_matrix = x is not None and x.shape is not None and len(x.shape) == 2  # all that Gemm takes
        weight = find_weight(node) if is_matrix else None
        if weight is None or weight.constant is None or len(split_rows(weight.rows)) == 1:
            continue
        parts = []
        for first, count in split_rows(weight.rows):
            rows = add_rows(graph, weight.constant, first, count)
            bias = slice_bias(graph, weight, first, count)
            parts.append(ir.node("Gemm", [x, rows, bias], {"transB": 1}))
        replace_by_parts(graph, node, parts)
    RemoveUnusedNodesPass()(model)


def slice_bias(graph: ir.Graph, weight: Weight, first: int, count: int) -> ir.Value | None:
    """Return the bias of `count` rows of a weight, from row `first` on."""
    if weight.bias is None or count == weight.rows:
        return weight.bias
    return add_rows(graph, weight.bias, first, count)


def split_rows(rows: int) -> list[tuple[int, int]]:
    """Return (first row, number of rows) of each piece of a weight."""
    if rows < SPLIT_FROM_ROWS:
        return [(0, rows)]
    step = -(-rows // PARTS)
    return [(first, min(step, rows - first)) for first in range(0, rows, step)]


def replace_by_parts(graph: ir.Graph, node: ir.Node, parts: Sequence[ir.Node]) -> None:
    """Replace a node by nodes whose results, side by side, are its result."""
    old = node.outputs[0]
    for number, part in enumerate(parts):
        part.name = f"{node.name}.{number}"
        part.outputs[0].name = f"{old.name}.{number}"
        part.outputs[0].type = old.type
        graph.insert_before(node, part)
    last = parts[0]
    if len(parts) > 1:
        last = ir.node("Concat", [part.outputs[0] for part in parts], {"axis": -1}, name=f"{node.name}.all")
        graph.insert_before(node, last)
    new = last.outputs[0]
    new.type = old.type
    new.shape = old.shape
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    new.name = old.name
    old.name = None
    graph.remove(node, safe=True)
