"""Finds NaN and infinity in a graph's constants."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from ...runtime.backends.backend import Array
from .attributes import blame, describe_node

PIECE_NUMBERS = 2**22  # of a constant that are looked at together
FLOATS = (
    ir.DataType.FLOAT,
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
    ir.DataType.DOUBLE,
)


def list_constants(graph: ir.Graph) -> Iterator[tuple[ir.Value, ir.TensorProtocol, ir.Node]]:
    """Yield the constants that are floats, with their values and the first node that reads each."""
    values = [*graph.initializers.values()]
    values += [node.outputs[0] for node in graph if node.op_type == "Constant"]
    for value in values:
        constant = ir.convenience.get_const_tensor(value)
        uses = list(value.uses())
        if constant is not None and constant.dtype in FLOATS and uses:
            yield value, constant, uses[0].node


def find_not_finite(graph: ir.Graph) -> Iterator[str]:
    """Yield the constants with NaN or infinity; a mask of zeros and -infinity may have them."""
    for value, constant, node in list_constants(graph):
        words = describe_not_finite(constant.numpy())
        if isinstance(constant, ir.ExternalTensor):
            constant.release()  # what is mapped counts as this process's memory
        if words:
            yield blame(node, f"constant {value.name!r} of {describe_node(node)} holds {words}")


def describe_not_finite(array: Array) -> str:
    """Return how many values are not finite, and where the first is; "" where all are, or in a mask."""
    flat = array.reshape(-1)
    count = 0
    first = None
    for begin in range(0, flat.size, PIECE_NUMBERS):
        piece = flat[begin : begin + PIECE_NUMBERS]
        bad = ~np.isfinite(piece)
        if bad.any():
            count += int(bad.sum())
            first = begin + int(np.argmax(bad)) if first is None else first
    if first is None or is_mask(flat):
        return ""
    place = tuple(int(i) for i in np.unravel_index(first, array.shape)) if array.shape else ()
    return f"{count} values that are not finite, the first at {list(place)}: {flat[first]}"


def is_mask(flat: Array) -> bool:
    """Tell whether all values are 0 or -infinity."""
    return bool(((flat == 0) | (flat == -np.inf)).all())
