"""Rewrites a graph of the `ort` dialect with ONNX Runtime's fused operators; its numbers stay the same.

ONNX Runtime would find some of these by itself each time it opens a graph. Written down, they cost no time
then, and the graph that was verified is the one that runs. Residuals and LayerNormalization stay apart: its
kernel for both together takes six times as long (see `SLOW_FUSIONS` of the runtime's ort_program.py).
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.rewriter import pattern
from onnxscript.rewriter.ort_fusions.bias_gelu import fuse_bias_gelu

from .rows import gather_rows_early
from .weights import MICROSOFT


def fuse_for_onnx_runtime(model: ir.Model) -> None:
    """Join bias and GELU, RMSNorms, SiLUs, and queries with keys and values; choose rows early."""
    drop_reshapes_there_and_back(model.graph)
    fuse_bias_gelu(model)
    fused.apply_to_model(model)
    pack_queries_keys_values(model.graph)
    gather_rows_early(model)
    RemoveUnusedNodesPass()(model)
    model.graph.opset_imports[MICROSOFT] = 1


def drop_reshapes_there_and_back(graph: ir.Graph) -> None:
    """Drop two Reshapes in a row that bring a tensor back to its own shape.

    The models split heads for every dialect; GroupQueryAttention reads and writes them joined.
    """
    for node in list(graph):
        if node.op_type != "Reshape":
            continue
        result = node.outputs[0]
        there = node.inputs[0]
        middle = None if there is None else there.producer()
        original = middle.inputs[0] if middle is not None and middle.op_type == "Reshape" else None
        if original is not None and original.shape is not None and original.shape == result.shape:
            ir.convenience.replace_all_uses_with(result, original)


def pack_queries_keys_values(graph: ir.Graph) -> None:
    """Feed GroupQueryAttention queries, keys and values as one tensor, which saves a copy of each."""
    for node in graph:
        if node.op_type != "GroupQueryAttention":
            continue
        parts = list(node.inputs[:3])
        split = None if parts[0] is None else parts[0].producer()
        if split is not None and split.op_type == "Split" and parts == list(split.outputs):
            node.replace_input_with(0, split.inputs[0])
            node.replace_input_with(1, None)
            node.replace_input_with(2, None)


class FastGeluFusion(pattern.RewriteRuleClassBase):
    """A fusion of GELU's tanh form over a sum with a bias."""

    def pattern(self, op, x, bias):  # type: ignore[no-untyped-def]
        return op.Gelu(op.Add(x, bias), approximate="tanh")

    def check(self, op, x, bias):  # type: ignore[no-untyped-def]
        return bias.shape is not None and len(bias.shape) == 1

    def rewrite(self, op, x, bias):  # type: ignore[no-untyped-def]
        return op.FastGelu(x, bias, _domain=MICROSOFT)


class RMSNormFusion(pattern.RewriteRuleClassBase):
    """A fusion of weight * x / sqrt(mean(x^2) + epsilon), over the last axis."""

    def pattern(self, op, x, weight, two, axes, epsilon):  # type: ignore[no-untyped-def]
        mean = op.ReduceMean(op.Pow(x, two), axes, keepdims=1)
        return op.Mul(weight, op.Mul(x, op.Reciprocal(op.Sqrt(op.Add(mean, epsilon)))))

    def check(self, op, x, weight, two, axes, epsilon):  # type: ignore[no-untyped-def]
        is_vector = weight.shape is not None and len(weight.shape) == 1
        return is_vector and read_number(two) == 2 and read_number(axes) == -1 and read_number(epsilon)

    def rewrite(self, op, x, weight, two, axes, epsilon):  # type: ignore[no-untyped-def]
        return op.SimplifiedLayerNormalization(x, weight, axis=-1, epsilon=read_number(epsilon))


def read_number(value: ir.Value) -> float | None:
    """Return the number that a value holds; None if it is not a constant of one number."""
    constant = get_const_tensor(value)
    return float(constant.numpy().item()) if constant is not None and constant.size == 1 else None


class SiluFusion(pattern.RewriteRuleClassBase):
    """A fusion of x * sigmoid(x)."""

    def pattern(self, op, x):  # type: ignore[no-untyped-def]
        return op.Mul(x, op.Sigmoid(x))

    def rewrite(self, op, x):  # type: ignore[no-untyped-def]
        return op.QuickGelu(x, alpha=1.0, _domain=MICROSOFT)


fused = pattern.RewriteRuleSet(
    [
        *FastGeluFusion.rule().commute(),  # type: ignore[no-untyped-call]
        RMSNormFusion.rule(),  # type: ignore[no-untyped-call]
        SiluFusion.rule(),  # type: ignore[no-untyped-call]
    ]
)
