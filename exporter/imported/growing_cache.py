"""Rewrites an imported decoder's attention over its growing cache in plain operators.

optimum's later steps of an encoder-decoder take one token and no padding. Rewritten, they take any number of
tokens, and padding.

B batch, T tokens of this step, P cached tokens, S = P + T, H heads, D head size
"""

from __future__ import annotations

import onnx_ir as ir

from ...models.masked import MASKED
from .attention import Attention
from .build import Builder


def add_growing_mask(op: Builder, ids: ir.Value, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return what a mask (B, S) adds to scores (B, 1, T, S), and how far tokens are behind each (1, T, S)."""
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
