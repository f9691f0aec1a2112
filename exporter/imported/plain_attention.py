"""Rewrites an imported encoder-decoder's attention in plain operators.

optimum's decoder projects keys and values of the source in its first step; here the encoder does, so that
they are computed once and every step is the same. Its later steps take one token and no padding; here they
take any number of tokens, and padding.

B rows, or sources; K beams of each source, T tokens of this step, S tokens that they attend to, H heads,
D head size, E hidden size
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ...models.masked import MASKED
from ..errors import ExportError
from ..passes.build import Builder
from ..passes.weights import add_initializer
from .attention import Attention
from .graph import Heads, require_producer

STATES = "encoder_hidden_states"
CROSS = re.compile(r"present\.(\d+)\.encoder\.(key|value)")


@dataclass(frozen=True)
class Projection:
    """The product states (B, S, E) @ weight (E, H * D) + bias."""

    name: str  # of the result: cross.0.key and so on
    weight: ir.Value
    bias: ir.Value | None
    heads: int
    size: int


def find_projections(first: ir.Model) -> list[Projection]:
    """Find the projections of each layer's keys and values in a decoder's first step."""
    found = []
    for value in first.graph.outputs:
        match = CROSS.fullmatch(str(value.name))
        if match is None:
            continue
        assert value.shape is not None
        heads = value.shape[1]  # of (B, H, S, D)
        size = value.shape[3]
        node = require_producer(value)
        bias = None
        while node.op_type in ("Transpose", "Reshape", "Add", "Cast"):
            constants = [v for v in node.inputs if v is not None and v.const_value is not None]
            given = [v for v in node.inputs if v is not None and v.const_value is None]
            if node.op_type == "Add":
                (bias,) = constants
            node = require_producer(given[0])
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        read = node.inputs[0]
        if weight is None or weight.const_value is None or read is None or read.name != STATES:
            raise ExportError(
                f"{value.name} comes from {node.op_type}, not from a product of {STATES} with a weight"
            )
        if not isinstance(heads, int) or not isinstance(size, int):
            raise ExportError(
                f"{value.name} has the shape {value.shape}, expected fixed heads and their size"
            )
        found.append(Projection(f"cross.{match[1]}.{match[2]}", weight, bias, heads, size))
    if not found:
        raise ExportError(
            f"the decoder's first step has no output present.N.encoder.key, projected from {STATES}"
        )
    return found


def add_projections(encoder: ir.Model, found: Sequence[Projection]) -> None:
    """Make keys and values (B, H, S, D) of every layer an encoder's outputs, instead of its states."""
    graph = encoder.graph
    states = next(value for value in graph.outputs if value.name == "last_hidden_state")
    states.name = STATES
    graph.outputs.clear()
    for each in found:
        op = Builder(graph, None, each.name)
        x = op("MatMul", states, copy_constant(graph, each.weight))
        x.shape = ir.Shape([None, None, each.heads * each.size])
        if each.bias is not None:
            x = op("Add", x, copy_constant(graph, each.bias))
        apart = op("Reshape", x, [0, 0, each.heads, each.size])
        result = op("Transpose", apart, perm=[0, 2, 1, 3])
        result.name = each.name
        graph.outputs.append(result)


def copy_constant(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Copy another graph's constant to this one."""
    assert value.const_value is not None
    return add_initializer(graph, f"{STATES}/{value.name}", value.const_value)


def add_source_mask(op: Builder, mask: ir.Value) -> ir.Value:
    """Turn a mask (B, S) of 1 and 0 into (B, 1, 1, S) to add to scores."""
    counts = op("Cast", op("Unsqueeze", mask, [1, 2]), to=ir.DataType.BOOL)
    return op("Where", counts, 0.0, MASKED)


def write_source_attention(
    graph: ir.Graph, attention: Attention, mask: ir.Value, ids: ir.Value, heads: Heads
) -> None:
    """Replace a layer's attention over the source; a source's K beams become one row of K * T queries.

    `mask` is added to scores, (B, 1, 1, S), and `ids` are the decoder's, (B * K, T).
    """
    op = Builder(graph, attention.product, f"{attention.keys.name}/attention")

    def fold(x: ir.Value, shape: ir.Value) -> ir.Value:  # (b, H, t, D) -> (b', H, t', D), token by token
        by_token = op("Transpose", x, perm=[0, 2, 1, 3])
        return op("Transpose", op("Reshape", by_token, shape), perm=[0, 2, 1, 3])

    sources = op("Shape", attention.keys, start=0, end=1)
    together = op("Concat", sources, [-1, heads.cached, heads.size], axis=0)
    apart = op("Concat", op("Shape", ids), [heads.cached, heads.size], axis=0)  # B * K, T, H, D
    queries = fold(attention.queries, together)
    context = add_attention(op, queries, attention.keys, attention.values, attention.scale, mask)
    ir.convenience.replace_all_uses_with(attention.product.outputs[0], fold(context, apart))


def add_growing_mask(op: Builder, ids: ir.Value, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the bias (B, 1, T, S) that a mask (B, S) adds to scores, and each token's distance (1, T, S)."""
    total = op("Squeeze", op("Shape", mask, start=1, end=2), [0])
    tokens = op("Squeeze", op("Shape", ids, start=1, end=2), [0])
    columns = op("Range", 0, total, 1)
    own = op("Range", op("Sub", total, tokens), total, 1)
    behind = op("Sub", op("Unsqueeze", own, [1]), columns)  # (T, S)
    counts = op("Cast", op("Unsqueeze", mask, [1, 2]), to=ir.DataType.BOOL)
    visible = op("And", counts, op("GreaterOrEqual", behind, 0))
    added = op("Where", visible, 0.0, MASKED)
    return added, op("Unsqueeze", behind, [0])


def write_growing_attention(graph: ir.Graph, attention: Attention, bias: ir.Value) -> None:
    """Replace a layer's attention by softmax(q k^T * scale + bias) v; the bias spreads to (B, H, T, S)."""
    keys, values = attention.present
    op = Builder(graph, attention.product, str(keys.name))
    context = add_attention(op, attention.queries, keys, values, attention.scale, bias)
    ir.convenience.replace_all_uses_with(attention.product.outputs[0], context)


def add_attention(
    op: Builder, q: ir.Value, k: ir.Value, v: ir.Value, scale: float, bias: ir.Value
) -> ir.Value:
    """Add attention of q (B, H, T, D) over k and v (B, H, S, D)."""
    if scale != 1.0:
        q = op("Mul", q, scale)
    scores = op("MatMul", q, op("Transpose", k, perm=[0, 1, 3, 2]))
    weights = op("Softmax", op("Add", scores, bias), axis=-1)
    return op("MatMul", weights, v)
