"""Checks how an encoder's int8 products smooth and round rows, by the manifest and by its texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..calibration.repeat import RELATIVE, find_far
from ..passes.int8_rows import RowProduct, RowRule, StaticRule, read_rule
from ..passes.quantized_weight import StoredRows, StoredWeight
from .attributes import SINGLE, blame, describe_node, read_number

Products = Mapping[tuple[str, ...], RowProduct]


def find_wrong_rows(
    stored: Iterable[StoredWeight], rules: Mapping[str, Mapping[str, Any]], products: Products
) -> Iterator[str]:
    """Yield smoothings, steps and zero points that differ from the manifest's, or from the texts'.

    A product that does not round its rows, though it should, is yielded as well.

    Args:
        stored: a graph's quantized weights.
        rules: the manifest's entries of an encoder's products, by their weights' names joined with "+".
        products: those that calibration gives once more, as far as it is repeated.
    """
    stored = list(stored)
    rounded = {weight.names for weight in stored if weight.rows is not None}
    for weight in stored:
        if weight.rows is None:
            if "+".join(weight.names) in rules and weight.names not in rounded:
                yield blame(weight.node, f"{describe_node(weight.node)} belongs to rows that are not rounded")
            continue
        faults: list[str] = []
        if (rule := rules.get("+".join(weight.names))) is not None:
            faults += find_wrong_rule(weight.rows, read_rule(rule), "the manifest's is", 0, SINGLE)
        if (product := products.get(weight.names)) is not None:
            faults += find_wrong_smoothing(weight.rows, product)
            # A zero point is rounded: from values a little off it may be the next one.
            texts = "the export's texts give"
            faults += find_wrong_rule(weight.rows, product.rule, texts, 1, 2 * RELATIVE)
        yield from (blame(weight.node, f"{describe_node(weight.node)} {fault}") for fault in faults)


def find_wrong_smoothing(rows: StoredRows, product: RowProduct) -> Iterator[str]:
    found = rows.smoothing
    if found is None or product.smoothing is None:
        return
    far = find_far(found, product.smoothing, 2 * RELATIVE)
    if far.any():
        first = int(np.argmax(far))
        yield (
            f"smooths {int(far.sum())} of {len(far)} columns otherwise than the export's texts ask: column"
            f" {first} by {found[first]:.4g}, not {product.smoothing[first]:.4g}"
        )


def find_wrong_rule(
    rows: StoredRows, rule: RowRule | StaticRule, whose: str, zero_off: int, step_off: float
) -> Iterator[str]:
    """Yield the faults of the zero point and the step of a product's rows.

    Where each row has a step of its own, neither is a constant of the node that rounds them.
    """
    places = slice(1) if rule.step is None else slice(2)
    for zero in map(read_number, rows.zeros[places]):
        if zero is None or not abs(zero - rule.zero) <= zero_off:  # NaN is not
            yield f"reads rows of the zero point {zero}, {whose} {rule.zero}"
    expected = 1.0 if rule.step is None else rule.step
    for step in map(read_number, rows.steps[places]):
        if step is None or not math.isclose(step, expected, rel_tol=step_off):
            yield f"reads rows in steps of {step}, {whose} {expected:.4g}"
