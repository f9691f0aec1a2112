"""Writes attention without a cache as one node, which ONNX Runtime computes without copies of its parts.

B batch, T tokens, H heads, D head size, E = H * D
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .build import Builder, replace_value
from .neighbours import find_only_reader, find_producer
from .weights import MICROSOFT

OPSET = 23  # the first that has Attention
HEADS_FIRST = [0, 2, 1, 3]  # (B, T, H, D) <-> (B, H, T, D)
TRANSPOSED = [0, 2, 3, 1]  # (B, T, H, D) -> (B, H, D, T)


@dataclass(frozen=True)
class AttentionPattern:
    """The inputs and the result of one attention."""

    queries: ir.Value  # (B, T, E), like keys and values, which may have another T
    keys: ir.Value
    values: ir.Value
    bias: ir.Value | None  # (B, 1, 1, T) or (B, 1, T, T)
    heads: int
    scale: float
    result: ir.Value  # (B, T, E)


def fuse_attention(model: ir.Model) -> None:
    """Replace each attention whose queries and keys are not rotated by their positions.

    Where nothing is added to scores, ONNX Runtime's own operator never has all of them: for 4,096 tokens it
    takes three quarters of the time, and no gigabyte. With a bias it would.
    """
    graph = model.graph
    op = Builder(graph, None, "attention")
    biases: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        parts = find_parts(node) if node.op_type == "Softmax" else None
        if parts is None:
            continue
        last = op.before = parts.result.producer()
        inputs = [parts.queries, parts.keys, parts.values]
        if parts.bias is None:
            op.metadata = node.metadata_props
            options = {"domain": MICROSOFT, "num_heads": parts.heads, "shape": parts.result.shape}
            replace_value(parts.result, op("MultiHeadAttention", *inputs, scale=parts.scale, **options))
            graph.opset_imports.setdefault(MICROSOFT, 1)
            continue
        op.metadata = {}
        if parts.bias not in biases:
            op.before = node  # before all attention that reads it
            biases[parts.bias] = expand_bias(op, parts.bias)
            op.before = last
        heads = {"q_num_heads": parts.heads, "kv_num_heads": parts.heads}
        inputs.append(biases[parts.bias])
        replace_value(parts.result, op("Attention", *inputs, scale=parts.scale, **heads))
        graph.opset_imports[""] = max(OPSET, graph.opset_imports[""])
    RemoveUnusedNodesPass()(model)


def expand_bias(op: Builder, bias: ir.Value) -> ir.Value:
    """Return a bias (B, 1, 1, T) as (B, 1, T, T), once for all layers: the operator takes no other shape."""
    assert bias.shape is not None
    if bias.shape[2] != 1:
        return bias
    return op("Expand", bias, op("Concat", [1, 1], op("Shape", bias, start=3, end=4), [1], axis=0))


def find_parts(softmax: ir.Node) -> AttentionPattern | None:
    """Return the parts of the attention around a Softmax; None if it has another form."""
    masked = find_producer(softmax.inputs[0], "Add")
    added = softmax.inputs[0] if masked is None else masked.inputs[0]
    bias = None if masked is None else masked.inputs[1]
    context = find_only_reader(softmax.outputs[0], ["MatMul"])
    transposed = None if context is None else find_only_reader(context.outputs[0], ["Transpose"])
    joined = None if transposed is None else find_only_reader(transposed.outputs[0], ["Reshape"])
    if context is None or transposed is None or joined is None:
        return None
    scores = find_producer(added, "MatMul")
    scaled = None if scores is None else find_producer(scores.inputs[0], "Mul")
    if scores is None or scaled is None or not is_permutation(transposed, HEADS_FIRST):
        return None
    if masked is not None and not is_bias(bias):
        return None
    scale = None if scaled.inputs[1] is None else scaled.inputs[1].const_value
    queries = find_joined_heads(scaled.inputs[0], HEADS_FIRST)
    keys = find_joined_heads(scores.inputs[1], TRANSPOSED)
    values = find_joined_heads(context.inputs[1], HEADS_FIRST)
    heads = None if context.outputs[0].shape is None else context.outputs[0].shape[1]
    if queries is None or keys is None or values is None or scale is None or scale.size != 1:
        return None
    if not isinstance(heads, int):
        return None
    return AttentionPattern(
        queries, keys, values, bias, heads, float(scale.numpy().item()), joined.outputs[0]
    )


def find_joined_heads(value: ir.Value | None, permutation: list[int]) -> ir.Value | None:
    """Return the value (B, T, E) that is split into heads and transposed; None if more happens to it."""
    transpose = find_producer(value, "Transpose")
    if transpose is None or not is_permutation(transpose, permutation):
        return None
    reshape = find_producer(transpose.inputs[0], "Reshape")
    joined = None if reshape is None else reshape.inputs[0]
    is_joined = joined is not None and joined.shape is not None and len(joined.shape) == 3
    return joined if is_joined else None


def is_permutation(transpose: ir.Node, permutation: list[int]) -> bool:
    return list(transpose.attributes["perm"].as_ints()) == permutation


def is_bias(value: ir.Value | None) -> bool:
    """Tell whether a value is a mask that all heads share."""
    return value is not None and value.shape is not None and len(value.shape) == 4 and value.shape[1] == 1
