"""Replaces positions that a traced decoder counts from the length of its cache by each row's own.

B batch, T tokens of this step, P cached tokens, E hidden size
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from ..errors import ExportError
from ..passes.build import Builder
from ..passes.neighbours import find_only_reader
from .evaluate import evaluate, make_example_input
from .graph import add_input, depends_on_shapes, walk_back

SPREADS = ("Unsqueeze", "Expand", "Cast")
PASTS = (0, 5)  # P in the two runs that show how positions follow from it
TOKENS = 3  # T in them, where it counts


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
        while (reader := find_only_reader(value, SPREADS)) is not None:
            value = reader.outputs[0]
        op = Builder(graph, node, f"positions/{node.name}")
        rows = op("Gather", node.inputs[0], op("Add", positions, offset), axis=0)  # (B, T, E)
        ir.convenience.replace_all_uses_with(value, rows)
    return bool(found)


def read_positions(model: ir.Model) -> None:
    """Add the input position_ids (B, T) to a decoder that turns queries and keys by P and T alone.

    Without it all rows have the same positions, also where they are not of the same length.
    """
    graph = model.graph
    if any(value.name == "position_ids" for value in graph.inputs):
        return
    turning = {
        node for cos in graph if cos.op_type == "Cos" and cos.inputs[0] for node in walk_back(cos.inputs[0])
    }
    counted = find_counted(model, turning)
    if not counted:
        return
    positions = add_input(graph, "position_ids", ["batch", "tokens"])
    for value in counted:
        for use in list(value.uses()):
            if use.node in turning:  # others make masks
                use.node.replace_input_with(use.idx, positions)
    forget_single_rows(positions)


def find_counted(model: ir.Model, nodes: Iterable[ir.Node]) -> list[ir.Value]:
    """Return the values that the nodes read and that are always P, P + 1, ... (1, T)."""
    read = {value for node in nodes for value in node.inputs if value is not None}
    asked = {
        str(value.name): value
        for value in read
        if value.dtype == ir.DataType.INT64 and value.producer() is not None and depends_on_shapes(value)
    }
    if not asked:
        return []
    runs = evaluate(
        model, list(asked), lambda value: [make_example_input(value, past, TOKENS) for past in PASTS]
    )
    expected = [np.arange(past, past + TOKENS)[None] for past in PASTS]
    return [
        value
        for value, *arrays in zip(asked.values(), *runs, strict=True)
        if all(np.array_equal(array, want) for array, want in zip(arrays, expected, strict=True))
    ]


def forget_single_rows(value: ir.Value) -> None:
    """Drop the shapes of results of a value that had one row, as it has B rows now."""
    waiting = [value]
    while waiting:
        for use in waiting.pop().uses():
            for result in use.node.outputs:
                if result.shape is not None and result.shape and result.shape[0] == 1:
                    result.shape = None
                    waiting.append(result)


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
            raise ExportError(f"positions {name!r} do not continue from the length of the past")
        found.append(beyond.pop())
    return found


def is_table(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None and len(value.const_value.shape) == 2
