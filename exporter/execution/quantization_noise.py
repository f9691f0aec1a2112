"""What a graph's quantized operators may change: each code moved as rounding to a code moves a number."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ...runtime.backends.backend import Array
from .node_executor import WideExecutor

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


def list_live_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes that a graph's outputs depend on, from the last to the first."""
    wanted = set(graph.outputs)
    live = []
    for node in reversed(graph):
        if wanted.isdisjoint(node.outputs):
            continue
        live.append(node)
        wanted |= {value for value in node.inputs if value is not None}
    return live


def find_code_bits(node: ir.Node) -> set[int]:
    """Return how many bits the codes have that a node reads; nothing of an operator without codes."""
    read = [node.inputs[place] for place in CODE_INPUTS.get(node.op_type, ()) if place < len(node.inputs)]
    dtypes = {value.dtype for value in read if value is not None}
    if node.op_type in ("MatMulNBits", "GatherBlockQuantized") and "bits" in node.attributes:
        return {node.attributes["bits"].as_int()}
    return {bits for bits, kinds in ((4, INT4), (8, INT8)) if dtypes & set(kinds)}


class QuantizationNoiseExecutor(WideExecutor):
    """Computes a graph in fp32, with the codes of its quantized operators moved at random."""

    def __init__(self, model: ir.Model) -> None:
        super().__init__(model, False)
        self.random = np.random.default_rng(0)  # the same draws in each run

    def run_node(self, node: ir.Node, feeds: list[Array | None]) -> list[Array]:
        moved = list(feeds)
        bits = find_code_bits(node)
        for place in CODE_INPUTS.get(node.op_type, ()) if bits else ():
            codes = feeds[place] if place < len(feeds) else None
            if codes is not None:
                moved[place] = self.move_codes(codes, packed=4 in bits and codes.dtype == np.uint8)
        return super().run_node(node, moved)

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
