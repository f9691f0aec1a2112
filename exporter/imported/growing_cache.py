"""Rewrites an imported decoder's attention over its growing cache in plain operators.

optimum's later steps of an encoder-decoder take one token and no padding. Rewritten, they take any number of
tokens, and padding.

B batch, T tokens of this step, P cached tokens, S = P + T, H heads, D head size
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...models.masked import MASKED
from .attention import Attention
from .build import Builder


def add_growing_mask(op: Builder, ids: ir.Value, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return what is added to scores (B, 1, T, S), and how far each token is behind another (1, T, S).

    Args:
        ids: (B, T).
        mask: (B, S), 1 where a token counts.
    """
    zero = op.constant(0)
    one = op.constant(1)
    axis = op.constant([0])
    total = op("Squeeze", op("Shape", mask, start=1, end=2), axis)
    tokens = op("Squeeze", op("Shape", ids, start=1, end=2), axis)
    columns = op("Range", zero, total, one)
    own = op("Range", op("Sub", total, tokens), total, one)
    behind = op("Sub", op("Unsqueeze", own, op.constant([1])), columns)  # (T, S)
    counts = op("Cast", op("Unsqueeze", mask, op.constant([1, 2])), to=ir.DataType.BOOL)
    visible = op("And", counts, op("GreaterOrEqual", behind, zero))
    added = op("Where", visible, op.constant(0.0, np.float32), op.constant(MASKED, np.float32))
    return added, op("Unsqueeze", behind, axis)


def write_growing_attention(graph: ir.Graph, attention: Attention, bias: ir.Value) -> None:
    """Replace a layer's attention by softmax(q k^T * scale + bias) v.

    Args:
        bias: mask and biases, broadcastable to (B, H, T, S).
    """
    op = Builder(graph, attention.product, str(attention.present[0].name))
    context = add_attention(
        op, attention.queries, attention.present[0], attention.present[1], attention.scale, bias
    )
    ir.convenience.replace_all_uses_with(attention.product.outputs[0], context)


def add_attention(
    op: Builder, q: ir.Value, k: ir.Value, v: ir.Value, scale: float, bias: ir.Value
) -> ir.Value:
    """Add attention of q (B, H, T, D) over k and v (B, H, S, D)."""
    if scale != 1.0:
        q = op("Mul", q, op.constant(scale, np.float32))
    scores = op("MatMul", q, op("Transpose", k, perm=[0, 1, 3, 2]))
    weights = op("Softmax", op("Add", scores, bias), axis=-1)
    return op("MatMul", weights, v)
