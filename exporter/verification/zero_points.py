"""Reads what whole numbers count from: weights from the middle, and rows from what the manifest says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ..passes.int8_encoder import COLUMNS
from ..passes.quantize import WEIGHT
from .attributes import SINGLE, describe_node, read_number

WEIGHTS_ZERO = {"MatMulNBits": 3, "GatherBlockQuantized": 3}  # where they read zero points
GROUPS = 4  # and groups of columns, which the exporter never writes
COLUMNS_ZERO = 5


def find_wrong_zero_points(graph: ir.Graph, products: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the nodes with zero points, or steps of rows, that the quantizer does not write.

    Args:
        graph: is read.
        products: the manifest's entries of an encoder's products, by their weights' names joined with "+".
    """
    rules = {names.split("+")[0]: rule for names, rule in products.items()}
    for node in graph:
        if node.op_type == "MatMulIntegerToFloat":
            yield from check_columns(node, rules)
            continue
        place = WEIGHTS_ZERO.get(node.op_type)
        zeros = get_input(node, place) if place is not None else None
        if zeros is not None and not is_middle(zeros, node.attributes["bits"].as_int()):
            words = f"has zero points {zeros.name!r} that are not the middle of its numbers"
            yield f"{describe_node(node)} {words}"
        if node.op_type == "MatMulNBits" and WEIGHT in node.metadata_props and get_input(node, GROUPS):
            yield f"{describe_node(node)} has an order of columns, which no graph of this exporter has"


def get_input(node: ir.Node, place: int) -> ir.Value | None:
    return node.inputs[place] if place < len(node.inputs) else None


def is_middle(zeros: ir.Value, bits: int) -> bool:
    """Tell whether all zero points are 2^(bits-1), as they are where none are given."""
    constant = ir.convenience.get_const_tensor(zeros)
    if constant is None:
        return False
    codes = constant.numpy()
    if bits == 4 and codes.dtype == np.uint8:  # two of them in a byte; one may be there to fill it
        return bool(((codes & 15) == 8).all() and np.isin(codes >> 4, (0, 8)).all())
    return bool((codes == 1 << (bits - 1)).all())


def check_columns(node: ir.Node, rules: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield what is wrong with how an encoder's product counts rows and columns."""
    zeros = get_input(node, COLUMNS_ZERO)
    if zeros is not None:
        constant = ir.convenience.get_const_tensor(zeros)
        if constant is None or constant.numpy().any():
            yield f"{describe_node(node)} has zero points {zeros.name!r} of its columns that are not 0"
    columns = get_input(node, 1)
    rule = rules.get(str(columns.name if columns is not None else "").partition(COLUMNS)[0])
    if rule is None:
        return
    zero = read_number(get_input(node, 4))
    if zero != rule["zero"]:
        yield f"{describe_node(node)} has the zero point {zero} of its rows, the manifest's is {rule['zero']}"
    step = rule.get("step") or 1.0
    scale = read_number(get_input(node, 2))
    if scale is None or not np.isclose(scale, step, rtol=SINGLE, atol=0):
        yield f"{describe_node(node)} has the step {scale} of its rows, the manifest's is {step:g}"
    rows = get_input(node, 0)
    quantize = None if rows is None else rows.producer()
    if quantize is None or quantize.op_type != "QuantizeLinear" or not rule.get("step"):
        return
    if (read_number(get_input(quantize, 1)), read_number(get_input(quantize, 2))) != (scale, zero):
        yield f"{describe_node(quantize)} rounds by another step or zero point than {describe_node(node)}"
