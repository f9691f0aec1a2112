"""Finds the nodes around a value: the node that computes it, and those that read it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir


def find_producer(value: ir.Value | None, operator: str) -> ir.Node | None:
    """Return the node that computes a value if it has the given operator."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == operator else None


def find_only_reader(value: ir.Value, operators: Collection[str]) -> ir.Node | None:
    """Return the only node that reads a value if it has one of the given operators."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.op_type not in operators:
        return None
    return uses[0].node


def find_below(value: ir.Value, operator: str) -> Iterator[ir.Node]:
    """Yield the nearest nodes of an operator among those that depend on a value."""
    waiting = [value]
    seen = set()
    while waiting:
        for node, _ in waiting.pop(0).uses():
            if node in seen or node.op_type == "Shape":
                continue
            seen.add(node)
            if node.op_type == operator:
                yield node
            else:
                waiting += node.outputs
