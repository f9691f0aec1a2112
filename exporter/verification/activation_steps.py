"""Reads how an encoder's int8 products smooth and round what they read, against calibration once more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from ..calibration.repeat import RELATIVE, find_far_columns
from ..passes.int8_encoder import COLUMNS, UNSMOOTHING
from ..passes.int8_rows import RowProduct, RowRule
from .attributes import describe_node, read_number

Products = Mapping[tuple[str, ...], RowProduct]


def find_wrong_steps(graph: ir.Graph, products: Products) -> Iterator[str]:
    """Yield smoothings, steps and zero points that are not those of the export's texts."""
    meant = {names[0]: product for names, product in products.items()}
    for node in graph:
        if node.op_type != "MatMulIntegerToFloat" or node.inputs[1] is None:
            continue
        name = str(node.inputs[1].name).partition(COLUMNS)[0]
        if name in meant:
            for fault in (
                *find_wrong_smoothing(graph, name, meant[name]),
                *find_wrong_rule(node, meant[name].rule),
            ):
                yield f"{describe_node(node)} {fault}"


def find_wrong_smoothing(graph: ir.Graph, name: str, product: RowProduct) -> Iterator[str]:
    value = graph.initializers.get(name + UNSMOOTHING)
    constant = None if value is None else value.const_value
    if constant is None or product.smoothing is None:
        return
    with np.errstate(all="ignore"):
        found = np.asarray(1 / constant.numpy(), np.float32)
    far = find_far_columns(found, product.smoothing)
    if far.any():
        first = int(np.argmax(far))
        yield (
            f"smooths {int(far.sum())} of {len(far)} columns otherwise than the export's texts ask: column"
            f" {first} by {found[first]:.4g}, not {product.smoothing[first]:.4g}"
        )


def find_wrong_rule(node: ir.Node, rule: RowRule) -> Iterator[str]:
    """Yield what is wrong with the zero point of a product's rows, and with their step if all have one."""
    zero = read_number(node.inputs[4])
    # A zero point is rounded: from numbers a little off it may be the next one.
    if zero is None or abs(zero - rule.zero) > 1:
        yield f"reads rows of the zero point {zero}, the export's texts give {rule.zero}"
    quantizer = None if node.inputs[0] is None else node.inputs[0].producer()
    if rule.step is None or quantizer is None:
        return
    for place in (read_number(node.inputs[2]), read_number(quantizer.inputs[1])):
        if place is None or not math.isclose(place, rule.step, rel_tol=2 * RELATIVE):
            found = "no constant" if place is None else f"{place:.4g}"
            yield f"reads rows in steps of {found}, the export's texts give {rule.step:.4g}"
            return
