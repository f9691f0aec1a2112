"""Tables of biases that depend on the distance between two tokens, such as T5's.

L the context's length, H heads, B batch, T tokens of this step, S tokens that they attend to
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ...runtime.backends.backend import Array
from ..errors import ExportError
from ..passes.build import Builder
from .attention import Attention
from .evaluate import evaluate, make_example_input
from .graph import depends_on_shapes

LONGEST_TABLE = 2048  # longest context whose whole bias is computed once to read its table off


def compute_distance_tables(model: ir.Model, found: Sequence[Attention], length: int) -> list[Array | None]:
    """Compute each layer's bias of its scores by distance, (L, H); None where it only masks.

    Verification finds it if more than the distance counts.
    """
    tables = []
    for bias in compute_biases(model, found, length):
        table = np.ascontiguousarray(bias[0, :, 0, ::-1].T)  # (L, H)
        tables.append(table if table.any() else None)
    return tables


def compute_biases(model: ir.Model, found: Sequence[Attention], length: int) -> list[Array]:
    """Compute the bias (1, H, 1, L) that each layer adds to its scores, where H may be 1.

    The graph itself is run, once, for the last token of a full context of `length` L.
    """
    names = list(dict.fromkeys(str(bias.name) for attention in found for bias in attention.biases))
    nothing: Array = np.zeros((1, 1, 1, length), np.float32)
    if not names:
        return [nothing] * len(found)

    (arrays,) = evaluate(model, names, lambda value: [make_example_input(value, length - 1)])
    by_name = dict(zip(names, arrays, strict=True))
    biases = []
    for attention in found:
        total = sum((by_name[str(bias.name)] for bias in attention.biases), start=nothing)
        if total.ndim != 4 or total.shape[0] != 1 or total.shape[2:] != (1, length):
            raise ExportError(f"the attention bias has the unsupported shape {total.shape}")
        biases.append(total)
    return biases


def add_distance_bias(
    op: Builder, mask: ir.Value | None, behind: ir.Value, table: Array | None, name: str
) -> ir.Value | None:
    """Return a mask and a table's biases for distances (B, T, S), of at least 0, added up as (B, H, T, S)."""
    if table is None:
        return mask
    found = op("Gather", op.add_constant(table, name), op("Max", behind, 0), axis=0)
    bias = op("Transpose", found, perm=[0, 3, 1, 2])
    return bias if mask is None else op("Add", mask, bias)


def tabulate_distances(model: ir.Model, ids: ir.Value, length: int) -> None:
    """Look up an encoder's bias of its scores by distance, instead of computing it in each run.

    T5 takes a logarithm of distances, which is infinite for 0, and which fp16 cannot represent. `ids` are
    (B, T), `length` is L.
    """
    graph = model.graph
    found = {
        str(value.name): value
        for node in graph
        if node.op_type == "Add"
        for value in node.inputs
        if value is not None and value.dtype == ir.DataType.FLOAT and depends_on_shapes(value)
    }
    if not found or length > LONGEST_TABLE:
        return
    (arrays,) = evaluate(model, list(found), lambda value: [np.ones((1, length), np.int64)])
    op = Builder(graph, graph[0], "distances")
    tokens = op("Squeeze", op("Shape", ids, start=1, end=2), [0])
    own = op("Range", 0, tokens, 1)
    ahead = op("Sub", own, op("Unsqueeze", own, [1]))  # (T, T)
    index = op("Add", ahead, length - 1)
    for value, bias in zip(found.values(), arrays, strict=True):
        table = read_distance_table(bias, length)
        if table is not None:
            constant = op.add_constant(table, f"{value.name}/table")
            rows = op("Transpose", op("Gather", constant, index, axis=0), perm=[2, 0, 1])
            ir.convenience.replace_all_uses_with(value, op("Unsqueeze", rows, [0]))
    common.RemoveUnusedNodesPass()(model)


def read_distance_table(bias: Array, length: int) -> Array | None:
    """Return the table (2 * L - 1, H) of a bias (1, H, L, L), or None if more than the distance counts."""
    if bias.ndim != 4 or bias.shape[0] != 1 or bias.shape[2:] != (length, length):
        return None
    table = np.concatenate([bias[0, :, -1, :-1], bias[0, :, 0]], axis=1)  # (H, 2 * L - 1)
    rows = np.arange(length)
    same = np.array_equal(table[:, rows - rows[:, None] + length - 1], bias[0])
    return np.ascontiguousarray(table.T) if same else None
