"""Replaces positions that a traced decoder counts from the length of its cache by each row's own.

B batch, T tokens of this step, P cached tokens, E hidden size
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from ..errors import ExportError
from ..passes.build import Builder
from .evaluate import evaluate, make_example_input
from .graph import depends_on_shapes, walk_back

SPREADS = ("Unsqueeze", "Expand", "Cast")
PASTS = (0, 5)  # P in the two runs that show how positions follow from it


def use_positions(model: ir.Model, positions: ir.Value, biases: Iterable[ir.Value]) -> bool:
    """Look `positions` (B, T) up wherever a table is read by P alone; tell whether there is such a table."""
    graph = model.graph
    others = {node for bias in biases for node in walk_back(bias)}  # attention's own
    found = [
        node
        for node in graph
        if node.op_type == "Gather"
        and node not in others
        and is_table(node.inputs[0])
        and depends_on_shapes(node.inputs[1])
    ]
    for node, offset in zip(found, find_offsets(model, found), strict=True):
        value = node.outputs[0]
        while (reader := find_only_reader(value)) is not None and reader.op_type in SPREADS:
            value = reader.outputs[0]
        op = Builder(graph, node, f"positions/{node.name}")
        rows = op("Gather", node.inputs[0], op("Add", positions, offset), axis=0)  # (B, T, E)
        ir.convenience.replace_all_uses_with(value, rows)
    return bool(found)


def find_offsets(model: ir.Model, nodes: list[ir.Node]) -> list[int]:
    """Return the difference between each table's first index and P."""
    names = [str(node.inputs[1].name) for node in nodes if node.inputs[1] is not None]
    if not names:
        return []

    runs = evaluate(model, names, lambda value: [make_example_input(value, past) for past in PASTS])
    found = []
    for name, *arrays in zip(names, *runs, strict=True):
        sizes = {array.size for array in arrays}
        beyond = {int(array.flat[0]) - past for array, past in zip(arrays, PASTS, strict=True)}
        if sizes != {1} or len(beyond) != 1:
            raise ExportError(f"positions {name!r} do not count the tokens behind the past")
        found.append(beyond.pop())
    return found


def is_table(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None and len(value.const_value.shape) == 2


def find_only_reader(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 else None
