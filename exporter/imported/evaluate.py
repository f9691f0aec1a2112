"""Computes a few values of a graph."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ...runtime.backends.backend import Array
from ...runtime.backends.ort_backend import open_plain_session


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
