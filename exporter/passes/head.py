"""Adds a linear classifier to an encoder's graph.

B batch, T tokens, F features, C classes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from .weights import add_initializer

FLOAT = ir.DataType.FLOAT


@dataclass
class AddLinearHead(ir.passes.InPlacePass):
    """Appends features -> one Gemm -> a new output."""

    # Names of graph outputs: hidden states (B, T, E), which are averaged over the tokens that the mask keeps;
    # or one vector (B, F) that is read as it is.
    states: Sequence[str]
    combine: str  # "concat" or "sum" of several states; "vector" for one vector
    mask: str  # the name of the attention mask (B, T)
    weight: npt.NDArray[np.float32]  # (C, F)
    bias: npt.NDArray[np.float32]  # (C,)
    output: str  # the new output's name
    normalize: bool = False  # whether the averaged vector gets length 1

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self.graph = model.graph
        by_name = {str(value.name): value for value in (*model.graph.inputs, *model.graph.outputs)}
        states = [by_name[name] for name in self.states]
        if self.combine == "vector":
            features = states[0]
        else:
            features = self.average_tokens(self.combine_states(states), by_name[self.mask])
        weight = self.add_constant("weight", self.weight)
        bias = self.add_constant("bias", self.bias)
        logits = self.add("Gemm", [features, weight, bias], {"transB": 1})
        logits.name = self.output
        logits.shape = ir.Shape([states[0].shape[0] if states[0].shape else None, len(self.bias)])
        model.graph.outputs.append(logits)
        return ir.passes.PassResult(model, modified=True)

    def combine_states(self, states: Sequence[ir.Value]) -> ir.Value:
        """Return one state (B, T, F) of several."""
        if self.combine == "concat" and len(states) > 1:
            return self.add("Concat", states, {"axis": -1})
        total = states[0]
        for state in states[1:]:
            total = self.add("Add", [total, state])
        return total

    def average_tokens(self, states: ir.Value, mask: ir.Value) -> ir.Value:
        """Return the mean (B, F) over the tokens that count."""
        one = self.add_constant("axis", np.array([1], np.int64))
        kept = self.add("Cast", [mask], {"to": int(FLOAT)})
        shares = self.add("Div", [kept, self.add("ReduceSum", [kept, one], {"keepdims": 1})])  # (B, T)
        row = self.add("MatMul", [self.add("Unsqueeze", [shares, one]), states])  # (B, 1, F)
        mean = self.add("Squeeze", [row, one])
        if not self.normalize:
            return mean
        return self.add("Div", [mean, self.add("ReduceL2", [mean, one], {"keepdims": 1})])

    def add(
        self, operator: str, inputs: Sequence[ir.Value], attributes: dict[str, int] | None = None
    ) -> ir.Value:
        """Append a node and return its one result, which is fp32."""
        number = len(self.graph)
        node = ir.node(operator, inputs, attributes or {}, name=f"head_{operator.lower()}_{number}")
        node.outputs[0].name = f"head.{operator.lower()}.{number}"
        node.outputs[0].type = ir.TensorType(FLOAT)
        self.graph.append(node)
        return node.outputs[0]

    def add_constant(self, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
        """Return an initializer, which is made once per name."""
        return add_initializer(self.graph, f"head.{name}", ir.tensor(array, name=f"head.{name}"))
