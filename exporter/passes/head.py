"""Adds a linear classifier to an encoder's graph.

B batch, T tokens, F features, C classes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from .build import Builder


@dataclass
class AddLinearHead(ir.passes.InPlacePass):
    """Appends a linear classifier: the features, one Gemm, and a new output."""

    # Names of graph outputs: hidden states (B, T, E), which are averaged over the tokens that the mask keeps;
    # or one vector (B, F) that is read as it is.
    states: Sequence[str]
    combine: str  # "concat" or "sum" of several states; "cls" of the first token; "vector" for one vector
    mask: str  # the name of the attention mask (B, T)
    weight: npt.NDArray[np.float32]  # (C, F)
    bias: npt.NDArray[np.float32]  # (C,)
    output: str  # the new output's name
    normalize: bool = False  # whether the averaged vector gets length 1
    per_token: bool = False  # whether each token gets logits

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        op = Builder(graph, None, "head")
        by_name = {str(value.name): value for value in (*graph.inputs, *graph.outputs)}
        states = [by_name[name] for name in self.states]
        if self.per_token:
            tokens = self.combine_states(op, states)
            features = op("Reshape", tokens, [-1, self.weight.shape[1]])  # (B T, F)
        elif self.combine == "vector":
            features = states[0]
        elif self.combine == "cls":
            features = op("Gather", states[0], 0, axis=1)
        else:
            features = self.average_tokens(op, self.combine_states(op, states), by_name[self.mask])
        weight = op.add_constant(self.weight, "head.weight")
        bias = op.add_constant(self.bias, "head.bias")
        logits = op("Gemm", features, weight, bias, transB=1)
        axes = list(states[0].shape)[:2] if states[0].shape else [None, None]
        if self.per_token:
            rows = op("Shape", states[0], start=0, end=2)
            logits = op("Reshape", logits, op("Concat", rows, [len(self.bias)], axis=0))
            logits.type = ir.TensorType(ir.DataType.FLOAT)
        logits.name = self.output
        logits.shape = ir.Shape([*axes[: 2 if self.per_token else 1], len(self.bias)])
        graph.outputs.append(logits)
        return ir.passes.PassResult(model, modified=True)

    def combine_states(self, op: Builder, states: Sequence[ir.Value]) -> ir.Value:
        """Return one state (B, T, F) of several."""
        if self.combine == "concat" and len(states) > 1:
            return op("Concat", *states, axis=-1)
        total = states[0]
        for state in states[1:]:
            total = op("Add", total, state)
        return total

    def average_tokens(self, op: Builder, states: ir.Value, mask: ir.Value) -> ir.Value:
        """Return the mean (B, F) over the tokens that are not masked."""
        kept = op("Cast", mask, to=ir.DataType.FLOAT)
        shares = op("Div", kept, op("ReduceSum", kept, [1], keepdims=1))  # (B, T)
        row = op("MatMul", op("Unsqueeze", shares, [1]), states)  # (B, 1, F)
        mean = op("Squeeze", row, [1])
        return op("Div", mean, op("ReduceL2", mean, [1], keepdims=1)) if self.normalize else mean
