"""Chooses the nodes of a graph that must stay in fp32, from the ranges of its numbers on real text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .quantization_form import KEPT
from .routing import find_routers
from .weights import find_weight

FP16_MAX = 65504.0
SMALLEST_SPREAD = 2.0**-13  # 2**-24, fp16's smallest step, is to it as fp16's last bit is to 1
HEADROOM = 2.0  # text that nobody saw may reach this much further
FP32 = "planforge.fp32"  # a node's metadata: its choice, as JSON
ATTENTION_PARTS = ("scores", "masked scores", "weights")  # measured apart, as "name of the result, part"

# Sums of squares and of exponentials leave fp16's range or lose its 11 bits long before their results do.
SUMS = {
    "InstanceNormalization": "sums squares",
    "LayerNormalization": "sums squares",
    "RMSNormalization": "sums squares",
    "SimplifiedLayerNormalization": "sums squares",
    "Softmax": "sums exponentials",
    "ReduceMean": "sums",
    "ReduceSum": "sums",
    # Each token adds to the state. TensorRT's parser gives their first states in fp32 alone.
    "GRU": "sums states",
    "LSTM": "sums states",
}


@dataclass(frozen=True)
class Fp32Reason:
    """The way a node avoids fp16, and the reason; one of the first three is given."""

    sums: str = ""  # what it adds up, or keeps, in words
    reached: float | None = None  # the largest magnitude of its results
    reads: str = ""  # the value that it reads and fp16 cannot hold
    # Of a product whose inputs fit: it stays in fp16 with weights of 2**-shift, and its result is multiplied
    # by 2**shift in fp32, which is exact. None of nodes that stay in fp32.
    shift: int | None = None

    @property
    def reason(self) -> str:
        """Return in words why the node does not compute in fp16."""
        if self.reached is not None:
            return f"reaches {self.reached:.3g}{self.scaled}"
        return self.sums or f"reads {self.reads}, which fp16 cannot hold"

    @property
    def group(self) -> str:
        """Return the reason without the parts that differ per node."""
        if self.reached is not None:
            return f"reaches{self.scaled}"
        return self.sums or "reads what fp16 cannot hold"

    @property
    def scaled(self) -> str:
        return "" if self.shift is None else f", so scaled by 2^-{self.shift}"

    def write(self, node: ir.Node) -> None:
        """Keep the choice in a node's metadata."""
        node.metadata_props[FP32] = json.dumps(vars(self))

    @classmethod
    def read(cls, node: ir.Node) -> Fp32Reason | None:
        """Return the choice in a node's metadata; None for a node that computes in fp16."""
        text = node.metadata_props.get(FP32)
        if text is None:
            return None
        try:
            return cls(**json.loads(text))
        except ValueError:
            return cls(sums=text)  # the first bundles had words


def choose_fp32_nodes(graph: ir.Graph, ranges: Mapping[str, float]) -> dict[str, Fp32Reason]:
    """Return the nodes of an fp32 graph that cannot simply be computed in fp16, by their names.

    `ranges` has the largest magnitude of results, by name; of an Attention's parts, by "name, part".
    """
    names = [node.name for node in graph]
    if not all(names) or len(set(names)) < len(names):
        raise ValueError("every node must have a unique name")
    together = dict.fromkeys(find_around_means(graph), Fp32Reason(SUMS["RMSNormalization"]))
    together |= dict.fromkeys(find_angles(graph), Fp32Reason("computes an angle"))
    together |= dict.fromkeys(find_routers(graph), Fp32Reason("chooses experts"))
    choices = {str(node.name): together.get(node) or choose_for_node(node, ranges) for node in graph}
    return {name: choice for name, choice in choices.items() if choice is not None}


def find_around_means(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes of RMSNorms in plain operators that square, add epsilon, take the root and invert.

    Squares of numbers below a hundredth, and epsilon, have few bits left in fp16.
    """
    found = set()
    for mean in graph:
        if mean.op_type != "ReduceMean" or mean.inputs[0] is None:
            continue
        square = mean.inputs[0].producer()
        if square is not None and square.op_type == "Pow":
            found.add(square)
            readers = [use.node for use in mean.outputs[0].uses()]
            while len(readers) == 1 and is_part_of_inverse_root(readers[0]):
                found.add(readers[0])
                readers = [use.node for use in readers[0].outputs[0].uses()]
    return found


def find_angles(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes that give waves of a float input, such as a time step, and that compute its angles.

    An angle of hundreds has no bit behind the point in fp16. Those of positions are a table's, or imported:
    they stay as their exporter has them.
    """
    found: set[ir.Node] = set()
    for wave in (node for node in graph if node.op_type in ("Sin", "Cos")):
        chain = {wave}
        waiting = [wave]
        read: set[ir.Value] = set()
        while waiting:
            for value in filter(None, waiting.pop().inputs):
                before = value.producer()
                if before is None:
                    read.add(value)
                elif before not in chain:
                    chain.add(before)
                    waiting.append(before)
        if any(value.is_graph_input() and value.dtype == ir.DataType.FLOAT for value in read):
            found |= chain
    return found


def is_part_of_inverse_root(node: ir.Node) -> bool:
    """Tell whether a node takes a root, inverts, or adds a constant."""
    given = [value for value in node.inputs if value is not None and value.const_value is None]
    return node.op_type in ("Add", "Div", "Reciprocal", "Sqrt") and len(given) == 1


def choose_for_node(node: ir.Node, ranges: Mapping[str, float]) -> Fp32Reason | None:
    if node.op_type in SUMS:
        return Fp32Reason(SUMS[node.op_type])
    if KEPT in node.metadata_props:  # in fp16 they would be others
        return Fp32Reason(f"keeps its {node.metadata_props[KEPT]}")
    results = [str(output.name) for output in node.outputs]
    measured = [*results, *(f"{name}, {part}" for name in results for part in ATTENTION_PARTS)]
    reached = max(ranges.get(name, 0.0) for name in measured)
    too_large = [value for value in node.inputs if value is not None and not can_hold(value, ranges)]
    if not fits(reached):
        shift = math.ceil(math.log2(reached * HEADROOM / FP16_MAX)) if math.isfinite(reached) else 0
        scalable = node.op_type == "MatMul" and not too_large and stays_normal(node, shift)
        return Fp32Reason(reached=reached, shift=shift if scalable else None)
    return Fp32Reason(reads=str(too_large[0].name)) if too_large else None


def stays_normal(product: ir.Node, shift: int) -> bool:
    """Tell whether weights of 2**-shift lose no more in fp16 than others: its smallest step is 2**-24."""
    weight = find_weight(product)
    if weight is None:
        return False
    spread = math.sqrt(float(np.square(weight.array(), dtype=np.float64).mean()))
    return spread * 2.0**-shift >= SMALLEST_SPREAD


def can_hold(value: ir.Value, ranges: Mapping[str, float]) -> bool:
    """Tell whether fp16 holds what a node reads."""
    if value.dtype != ir.DataType.FLOAT:
        return True
    if value.const_value is not None:
        return find_magnitude(value) <= FP16_MAX
    return fits(ranges.get(str(value.name), 0.0))


def fits(largest: float) -> bool:
    """Tell whether fp16 holds a magnitude, with room for unseen text; NaN never fits."""
    return largest * HEADROOM <= FP16_MAX


def find_magnitude(value: ir.Value) -> float:
    assert value.const_value is not None
    return float(np.abs(value.const_value.numpy()).max(initial=0.0))


def read_choices(graph: ir.Graph) -> dict[str, Fp32Reason]:
    """Return the nodes that `choose_fp32_nodes` chose for a graph that is in fp16 now."""
    choices = {str(node.name): Fp32Reason.read(node) for node in graph}
    return {name: choice for name, choice in choices.items() if choice is not None}
