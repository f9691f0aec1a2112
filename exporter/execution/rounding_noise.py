"""Measures what rounding may change in a graph's results: rounding to fp16, and of stored numbers.

Each code is moved as rounding to a code moves a number.
"""

from __future__ import annotations

from collections.abc import Collection

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ...runtime.backends.backend import Array, Arrays
from ..passes.store_blocks import ACCURACY_INT8
from .node_executor import HOLDS, WideExecutor, list_graphs, list_inputs, list_read

# The inputs of operators that hold codes: integers that stand for numbers by a scale.
CODE_INPUTS = {
    "ConvInteger": (0, 1),
    "DequantizeLinear": (0,),
    "DynamicQuantizeMatMul": (1,),
    "GatherBlockQuantized": (0,),
    "MatMulInteger": (0, 1),
    "MatMulIntegerToFloat": (0, 1),
    "MatMulNBits": (1,),
    "QAttention": (0, 1),
    "QGemm": (0, 3),
    "QLinearAdd": (0, 3),
    "QLinearConv": (0, 3),
    "QLinearMatMul": (0, 3),
    "QLinearMul": (0, 3),
}
INT8 = (ir.DataType.INT8, ir.DataType.UINT8)
INT4 = (ir.DataType.INT4, ir.DataType.UINT4)
NARROW = (np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4))
# A number that is rounded to a code is off by a uniform draw of one step, whose variance is 1/12. Moving one
# code of 24 up by a step and one down has the same variance.
MOVED = 1 / 24


def list_live_nodes(graph: ir.Graph, wanted: set[ir.Value] | None = None) -> list[ir.Node]:
    """Return the nodes that a graph's outputs depend on, those of branches too.

    `wanted` gets the values that are read, which may be those of a graph around it.
    """
    wanted = set() if wanted is None else wanted
    wanted.update(graph.outputs)
    live = []
    for node in reversed(graph):
        if wanted.isdisjoint(node.outputs):
            continue
        live.append(node)
        wanted.update(value for value in node.inputs if value is not None)
        for inner in list_graphs(node):
            live += list_live_nodes(inner, wanted)
    return live


def find_code_bits(node: ir.Node) -> set[int]:
    """Return how many bits the codes that a node reads have; nothing for an operator without codes."""
    dtypes = {value.dtype for value in list_codes(node) if value is not None}
    if node.op_type in ("MatMulNBits", "GatherBlockQuantized") and "bits" in node.attributes:
        return {node.attributes["bits"].as_int()}
    return {bits for bits, kinds in ((4, INT4), (8, INT8)) if dtypes & set(kinds)}


def list_computed(graph: ir.Graph) -> set[ir.Value]:
    """Return the values that nodes compute from a graph's inputs, those within its branches too."""
    given = set(list_inputs(graph))
    depending = set(given)

    def follow(part: ir.Graph) -> None:
        for node in part:
            for inner in list_graphs(node):
                follow(inner)
            if not depending.isdisjoint(list_read(node)):
                depending.update(node.outputs)

    follow(graph)
    return depending - given


def rounds_activations(node: ir.Node) -> bool:
    """Tell whether an operator itself rounds what it multiplies by weights to int8."""
    level = node.attributes.get("accuracy_level")
    return node.op_type == "MatMulNBits" and level is not None and level.as_int() == ACCURACY_INT8


def rounds_to_codes(graph: ir.Graph) -> bool:
    """Tell whether an output depends on computed values that are rounded to int8 or less."""
    computed = list_computed(graph)
    return any(
        rounds_activations(node) or (find_code_bits(node) and not computed.isdisjoint(list_codes(node)))
        for node in list_live_nodes(graph)
    )


def list_codes(node: ir.Node) -> list[ir.Value | None]:
    """Return the values that an operator reads as codes."""
    return [node.inputs[place] for place in CODE_INPUTS.get(node.op_type, ()) if place < len(node.inputs)]


class RoundingExecutor(WideExecutor):
    """Computes a graph in fp32, rounds the results that are fp16 in its file, and moves computed codes.

    A code that was computed is moved at random, as far as rounding may move it: what differs by one rounding
    of fp32 before it may be a whole step apart behind it.

    Args:
        half: the names of the results and inputs that are fp16.
        stored: whether values that the file stores are moved as well: codes at random, and what is fp16 by
            half a step, the most that its rounding has moved it.
    """

    def __init__(self, model: ir.Model, half: Collection[str], stored: bool) -> None:
        in_half = {
            value
            for graph in (model.graph, *model.graph.subgraphs())
            for value in graph.initializers.values()
            if value.dtype == ir.DataType.FLOAT16
        }
        super().__init__(model)
        self.half = half
        self.stored = stored
        self.computed = list_computed(model.graph)
        self.random = np.random.default_rng(0)  # the same draws in each run
        if stored:
            self.constants |= {value: self.move_half(self.constants[value]) for value in in_half}

    def run(self, inputs: Arrays) -> dict[str, Array]:
        return super().run({name: self.round(name, array) for name, array in inputs.items()})

    def run_node(self, node: ir.Node, feeds: list[Array | None]) -> list[Array]:
        moved = list(feeds)
        bits = find_code_bits(node)
        for place in CODE_INPUTS.get(node.op_type, ()) if bits else ():
            codes = feeds[place] if place < len(feeds) else None
            if codes is not None and (self.stored or node.inputs[place] in self.computed):
                moved[place] = self.move_codes(codes, packed=4 in bits and codes.dtype == np.uint8)
        if rounds_activations(node) and feeds[0] is not None:
            moved[0] = self.move_blocks(feeds[0], node.attributes["block_size"].as_int())
        results = super().run_node(node, moved)
        if node.op_type in HOLDS and self.stored:
            half = [str(value.name) in self.half for value in node.outputs]
            return [self.move_half(r) if is_half else r for r, is_half in zip(results, half, strict=True)]
        return [self.round(str(value.name), r) for value, r in zip(node.outputs, results, strict=True)]

    def round(self, name: str, array: Array) -> Array:
        """Round an array that is fp16 in the file."""
        if name not in self.half or array.dtype != np.float32:
            return array
        with np.errstate(over="ignore"):
            return array.astype(np.float16).astype(np.float32)

    def move_half(self, array: Array) -> Array:
        """Move numbers of fp16, given in fp32, up or down by half the step to the next one."""
        step = np.abs(np.spacing(array.astype(np.float16))).astype(np.float32)
        moved: Array = array + np.where(self.random.random(array.shape) < 0.5, -0.5, 0.5) * step
        return np.where(np.isfinite(moved), moved, array).astype(np.float32)

    def move_blocks(self, array: Array, size: int) -> Array:
        """Move values by up to half a step of the int8 codes that blocks of the last axis are rounded to."""
        width = array.shape[-1]
        padded = np.zeros((*array.shape[:-1], -(-width // size) * size), np.float32)
        padded[..., :width] = array
        blocks = padded.reshape(-1, size)  # a view
        steps = np.abs(blocks).max(axis=-1, keepdims=True) / 127
        blocks += steps * (self.random.random(blocks.shape, np.float32) - 0.5)
        return padded[..., :width]

    def move_codes(self, codes: Array, packed: bool) -> Array:
        """Move some codes by one step, within their type; `packed` has two of four bits in each byte."""
        if packed:
            low = self.move(codes & 15, 0, 15)
            high = self.move(codes >> 4, 0, 15)
            return (high << 4 | low).astype(np.uint8)
        if codes.dtype in NARROW:
            least, most = (-8, 7) if codes.dtype == NARROW[0] else (0, 15)
            return self.move(codes, least, most).astype(codes.dtype)
        if codes.dtype.kind not in "iu" or codes.dtype.itemsize > 1:
            return codes
        limits = np.iinfo(codes.dtype)
        return self.move(codes, limits.min, limits.max).astype(codes.dtype)

    def move(self, codes: Array, least: int, most: int) -> Array:
        draw = self.random.random(codes.shape, np.float32)
        step = (draw < MOVED).astype(np.int16) - (draw > 1 - MOVED)
        moved: Array = np.clip(codes.astype(np.int16) + step, least, most)
        return moved
