"""Reads the single numbers that a graph computes with: each must be one that the model's recipe has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ..passes.int8_rows import RowRule
from ..passes.weights import Stored
from ..tracing.modules import find_layer, find_module
from .attributes import HALF, SINGLE, describe_node, read_number
from .meant import Meant

# Nodes that compute with a number element by element.
ELEMENTWISE = ("Add", "Clip", "Div", "Max", "Min", "Mul", "Pow", "Sub", "Sum", "Where")
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
# Numbers of definitions: GELU's and its forms', squares and roots, masks, means, and no change at all.
COMMON = (
    0.0, 0.5, 1.0, 2.0, 3.0, -1.0, math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715, 1.702,
    -math.inf, -30000.0, -10000.0, float(np.finfo(np.float16).min), float(np.finfo(np.float32).min),
    1e-9, 1e-12,
)  # fmt: skip
NEAR = 0.1  # relative: another exporter's number that is nearer to one of the model's was meant to be it


def find_unknown_numbers(
    graph: ir.Graph, meant: Meant, products: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[str]:
    """Yield the nodes that compute with a number which the model does not have.

    Of another exporter's graphs only numbers in attention that are near one of the model's, and not it.

    Args:
        products: the manifest's entries of an encoder's products in int8.
    """
    known = [*COMMON, *meant.numbers, *list_shifts(graph), *list_bounds(products or {})]
    for node in graph:
        if node.op_type not in ELEMENTWISE or (not meant.is_ours and "attn" not in find_module(node)):
            continue
        for value in node.inputs:
            number = read_number(value)
            if value is None or number is None or value.dtype not in FLOATS:
                continue
            rounding = HALF if value.dtype == ir.DataType.FLOAT16 else SINGLE
            if any(is_near(number, x, rounding) or number == round_to_half(x) for x in known):
                continue
            if meant.is_ours or any(is_near(number, x, NEAR) for x in meant.numbers):
                yield f"{describe_node(node)} computes with {number:g}, which is no number of the model"


def is_near(number: float, other: float, apart: float) -> bool:
    return number == other or math.isclose(number, other, rel_tol=apart)


def round_to_half(number: float) -> float:
    """Return a number as fp16 has it; what is beyond its range is infinite."""
    with np.errstate(over="ignore"):
        return float(np.float16(number))


def list_shifts(graph: ir.Graph) -> Iterator[float]:
    """Yield what products of weights that are stored times 2^-k are multiplied by."""
    for value in graph.initializers.values():
        if shift := Stored.read(value).shift:
            yield 2.0**shift


def list_bounds(products: Mapping[str, Mapping[str, Any]]) -> Iterable[float]:
    """Return the numbers that rows are rounded to int8 with: the least of their largest, and 1 / steps."""
    for rule in map(RowRule.from_json, products.values()):
        yield from (rule.floor, 1 / rule.top)


def find_wrong_caps(graph: ir.Graph, meant: Meant) -> Iterator[str]:
    """Yield c * tanh(x / c), of scores and of logits, whose c is not the model's there."""
    for tanh in graph:
        read = tanh.inputs[0] if tanh.op_type == "Tanh" else None
        layer = find_layer(find_module(tanh))
        if read is None or not meant.has_softcap or not meant.is_ours:
            continue
        cap = meant.logits_softcap if layer is None else meant.layers[layer].softcap
        for node in (read.producer(), *(reader for reader, _ in tanh.outputs[0].uses())):
            if node is None or node.op_type not in ("Div", "Mul") or cap is None:
                continue
            number = next((x for value in node.inputs if (x := read_number(value)) is not None), None)
            if number is not None and not is_near(number, cap, HALF):
                yield f"{describe_node(node)} has the soft cap {number:g}, the model's is {cap:g}"
