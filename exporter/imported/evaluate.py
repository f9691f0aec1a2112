"""Computes a few values of a graph."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ...runtime.backends.backend import Array
from ...runtime.backends.ort_program import open_plain_session
from ..passes.weights import add_initializer

TOKEN = 1  # what every integer of an example is


def make_example_input(value: ir.Value, past: int, tokens: int = 1) -> Array:
    """Make an array for a decoder's input: one row, some tokens, two source tokens, `past` cached ones."""
    assert value.shape is not None
    name = str(value.name)
    if name.startswith("past"):
        free = past
    elif name == "attention_mask":
        free = past + tokens
    elif name.startswith(("cross", "encoder")):
        free = 2
    else:
        free = tokens
    shape = [1, *(axis if isinstance(axis, int) else free for axis in list(value.shape)[1:])]
    return (
        np.full(shape, TOKEN, np.int64) if value.dtype == ir.DataType.INT64 else np.zeros(shape, np.float32)
    )


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
    shrink_tables(asked.graph)
    common.RemoveUnusedNodesPass()(asked)
    feeds = {str(value.name): make_inputs(value) for value in asked.graph.inputs if value.uses()}
    drop_unused_inputs(asked.graph)
    with tempfile.TemporaryDirectory(prefix="planforge-import-") as folder:
        path = Path(folder, "asked.onnx")
        ir.save(asked, path, external_data="asked.data")
        session = open_plain_session(path)
        runs = zip(*feeds.values(), strict=True) if feeds else [()]
        return [session.run(list(names), dict(zip(feeds, arrays, strict=True))) for arrays in runs]


def shrink_tables(graph: ir.Graph) -> None:
    """Replace tables that are read for the result's shape alone, such as a vocabulary's, by tiny ones."""
    for node in graph:
        table = node.inputs[0] if node.op_type == "Gather" else None
        if table is None or table.const_value is None or len(table.const_value.shape) != 2:
            continue
        if {use.node.op_type for use in node.outputs[0].uses()} == {"Shape"}:
            width = int(table.const_value.shape.numpy()[1])
            name = f"{table.name}/tiny"
            tiny = ir.tensor(np.zeros((TOKEN + 1, width), np.float32), name=name)
            node.replace_input_with(0, add_initializer(graph, name, tiny))


def drop_unused_inputs(graph: ir.Graph) -> None:
    for value in [value for value in graph.inputs if not value.uses()]:
        graph.inputs.remove(value)
