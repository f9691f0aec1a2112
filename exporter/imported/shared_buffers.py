"""Replaces an imported decoder's attention over its growing cache by ONNX Runtime's over shared buffers.

B batch, T tokens of this step, H query heads, G heads of keys and values, D head size
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common

from ...runtime.bundle.artifact import TOTAL
from ..errors import ExportError
from ..passes.build import Builder
from ..passes.weights import MICROSOFT
from .attention import Attention, find_self_attentions
from .graph import Heads, add_input
from .windows import Windows


@dataclass(frozen=True)
class Rows:
    """The place of each row of a batch in the cache, in the form that GroupQueryAttention needs."""

    last: ir.Value  # last slot that a row's tokens fill (B,)
    total: ir.Value  # slots filled in the longest row (), an input
    positions: ir.Value  # of the tokens (B, T)


def share_buffers(model: ir.Model, heads: Heads, queries: int | None, windows: Windows) -> None:
    """Replace each layer's Concat with the past, and its attention, by GroupQueryAttention of H `queries`.

    The operator is causal and knows the layers' windows, so masks are dropped. Any other mask is lost, which
    verification finds. Positions follow from the lengths of the past.
    """
    assert queries is not None
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    found = find_self_attentions(graph, heads)
    rows = add_past_lengths(graph, inputs["input_ids"])
    for attention, window in zip(found, windows, strict=True):
        write_shared_attention(graph, attention, rows, heads, queries, window=window)
    model.opset_imports.setdefault(MICROSOFT, 1)
    common.RemoveUnusedNodesPass()(model)
    check_caches(graph)
    if mask := inputs.get("attention_mask"):
        if mask.uses():
            raise ExportError("attention_mask is used outside of attention")
        graph.inputs.remove(mask)


def add_past_lengths(graph: ir.Graph, ids: ir.Value) -> Rows:
    """Add the inputs past_lengths (B,) and total_sequence_length (), and return the values derived from them.

    The positions take the place of position_ids too.
    """
    past = add_input(graph, "past_lengths", ["batch"], ir.DataType.INT32)
    total = add_input(graph, TOTAL, [], ir.DataType.INT32)
    op = Builder(graph, graph[0], "rows")
    tokens = op("Shape", ids, start=1, end=2)  # (1,)
    offsets = op("Range", 0, op("Squeeze", tokens, [0]), 1)
    column = op("Cast", op("Unsqueeze", past, [1]), to=ir.DataType.INT64)
    positions = op("Add", column, offsets)
    # Not from `tokens`, which is on the host: see `GroupQueryCache.positions`.
    last = op("Cast", op("Gather", positions, -1, axis=1), to=ir.DataType.INT32)
    for value in [value for value in graph.inputs if value.name == "position_ids"]:
        ir.convenience.replace_all_uses_with(value, positions)
        graph.inputs.remove(value)
    return Rows(last, total, positions)


def write_shared_attention(
    graph: ir.Graph,
    attention: Attention,
    rows: Rows,
    heads: Heads,
    queries: int,
    bias: ir.Value | None = None,
    window: int | None = None,
) -> None:
    """Replace a layer's attention by one GroupQueryAttention, with a bias (B, H, T, total) or a window."""
    op = Builder(graph, attention.product, str(attention.present[0].name))

    def join_heads(x: ir.Value, count: int) -> ir.Value:  # (B, h, T, D) -> (B, T, h * D)
        moved = op("Transpose", x, perm=[0, 2, 1, 3])
        return op("Reshape", moved, [0, 0, count * heads.size])

    biased = () if bias is None else (None, None, None, bias)  # after unused inputs of rotary positions
    limits: dict[str, Any] = {}
    if window is not None:
        limits["local_window_size"] = window
    if attention.softcap is not None:
        limits["softcap"] = attention.softcap
    node = op.add(
        "GroupQueryAttention",
        join_heads(attention.queries, queries),
        join_heads(attention.keys, heads.cached),
        join_heads(attention.values, heads.cached),
        *attention.past,
        rows.last,
        rows.total,
        *biased,
        domain=MICROSOFT,
        results=3,
        num_heads=queries,
        kv_num_heads=heads.cached,
        scale=attention.scale,
        **limits,
    )
    spread = op("Reshape", node.outputs[0], [0, 0, queries, heads.size])
    moved = op("Transpose", spread, perm=[0, 2, 1, 3])
    ir.convenience.replace_all_uses_with(attention.product.outputs[0], moved)
    for old, new in zip(attention.present, node.outputs[1:], strict=True):
        name = old.name
        new.type = old.type
        old.name = f"{name}/grown"
        new.name = name
        graph.outputs[list(graph.outputs).index(old)] = new


def check_caches(graph: ir.Graph) -> None:
    """Refuse a decoder that reads more of its cache than keys and values, such as its length."""
    for value in graph.inputs:
        others = {use.node.op_type for use in value.uses()} - {"Concat", "GroupQueryAttention"}
        if str(value.name).startswith("past_key_values") and others:
            raise ExportError(
                f"{value.name} is read outside of attention, by {', '.join(sorted(others))}: positions follow"
                " from the cache's length in a way that is not known"
            )
