"""Reads how an encoder's int8 products smooth and round what they read, by the manifest and by its texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..calibration.repeat import RELATIVE, find_far_columns
from ..passes.int8_rows import RowProduct, RowRule
from ..passes.quantized_weight import StoredRows, StoredWeight
from .attributes import SINGLE, describe_node, read_number

Products = Mapping[tuple[str, ...], RowProduct]


def find_wrong_rows(
    stored: Iterable[StoredWeight], rules: Mapping[str, Mapping[str, Any]], products: Products
) -> Iterator[str]:
    """Yield smoothings, steps and zero points that are not those of the manifest, or of the export's texts.

    Args:
        stored: a graph's quantized weights.
        rules: the manifest's entries of an encoder's products, by their weights' names joined with "+".
        products: those that calibration gives once more, as far as it is repeated.
    """
    for weight in stored:
        if weight.rows is None:
            continue
        rule = rules.get("+".join(weight.names))
        product = products.get(weight.names)
        faults = [] if rule is None else [*find_unlike_manifest(weight.rows, rule)]
        if product is not None:
            faults += find_wrong_smoothing(weight.rows, product)
            faults += find_wrong_rule(weight.rows, product.rule)
        yield from (f"{describe_node(weight.node)} {fault}" for fault in faults)


def read_quantizer(rows: StoredRows) -> tuple[float | None, float | None]:
    """Return the step and the zero point that rows are rounded with; None where they are no constants."""
    if rows.quantizer is None or rows.quantizer.op_type != "QuantizeLinear":
        return None, None
    return read_number(rows.quantizer.inputs[1]), read_number(rows.quantizer.inputs[2])


def find_unlike_manifest(rows: StoredRows, rule: Mapping[str, Any]) -> Iterator[str]:
    zero = read_number(rows.zero)
    if zero != rule["zero"]:
        yield f"has the zero point {zero} of its rows, the manifest's is {rule['zero']}"
    step = rule.get("step") or 1.0
    scale = read_number(rows.step)
    if scale is None or not np.isclose(scale, step, rtol=SINGLE, atol=0):
        yield f"has the step {scale} of its rows, the manifest's is {step:g}"
    quantizer = rows.quantizer
    if rule.get("step") and quantizer is not None and read_quantizer(rows) != (scale, zero):
        yield f"reads rows that {describe_node(quantizer)} rounds by another step or zero point"


def find_wrong_smoothing(rows: StoredRows, product: RowProduct) -> Iterator[str]:
    found = rows.smoothing
    if found is None or product.smoothing is None:
        return
    far = find_far_columns(found, product.smoothing)
    if far.any():
        first = int(np.argmax(far))
        yield (
            f"smooths {int(far.sum())} of {len(far)} columns otherwise than the export's texts ask: column"
            f" {first} by {found[first]:.4g}, not {product.smoothing[first]:.4g}"
        )


def find_wrong_rule(rows: StoredRows, rule: RowRule) -> Iterator[str]:
    """Yield what is wrong with the zero point of a product's rows, and with their step if all have one."""
    zero = read_number(rows.zero)
    # A zero point is rounded: from numbers a little off it may be the next one.
    if zero is None or abs(zero - rule.zero) > 1:
        yield f"reads rows of the zero point {zero}, the export's texts give {rule.zero}"
    if rule.step is None or rows.quantizer is None:
        return
    for place in (read_number(rows.step), read_quantizer(rows)[0]):
        if place is None or not math.isclose(place, rule.step, rel_tol=2 * RELATIVE):
            found = "no constant" if place is None else f"{place:.4g}"
            yield f"reads rows in steps of {found}, the export's texts give {rule.step:.4g}"
            return
