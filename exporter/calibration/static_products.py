"""Chooses which products of an encoder's plan read their rows in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import accumulate

from ..passes.int8_rows import RowProduct
from ..passes.quantize import QuantizedWeights
from .blocks import Measure, Trials

Products = Mapping[tuple[str, ...], RowProduct]
FLOAT_BITS = 16  # of weights that stay as they are


def choose_static_products(
    begun: QuantizedWeights,
    products: Products,
    measures: Sequence[Measure],
    progress: Callable[[str], None],
) -> QuantizedWeights:
    """Return the weights with as many of these products as are close to the model.

    Where all of them lose too much, those that lose most for their size read floats, up to half of all
    weights: their weights alone are in int8, and in fp8, which loses more, they stay floats too. Where
    nothing comes near to being close, all products stay.

    Args:
        begun: all weights, and how they are rounded by themselves.
        products: by the weight's name.
        measures: measure in PyTorch what a rounding loses, the quickest first and the most exact last.
        progress: called with a line for each trial.
    """
    shapes = {name: read().shape for name, read in begun.read.items()}
    trials = Trials(begun, shapes, measures, progress)
    bits = FLOAT_BITS if begun.formats[begun.usual_bits].uses_gptq else begun.usual_bits
    worst, most = rank_groups(products, shapes)

    def is_close(count: int) -> bool:
        dropped = {name for together in worst[:count] for name in together}
        return trials.judge(mix(begun, products, dropped, bits), f"{len(dropped)} products read floats")

    find_fewest(is_close, most)
    return mix(begun, products, set(), bits) if trials.is_hopeless() else trials.best


def mix(begun: QuantizedWeights, products: Products, dropped: Set[str], bits: int) -> QuantizedWeights:
    """Return weights with all products but the dropped ones, whose weights have so many bits."""
    kept = {names: product for names, product in products.items() if dropped.isdisjoint(names)}
    by_rows = {name for names in kept for name in names}
    own = {name: bits if name in dropped else begun.usual_bits for name in begun.read if name not in by_rows}
    return replace(begun, bits=own, products=kept)


def rank_groups(
    products: Products, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[tuple[str, ...]], int]:
    """Return products by their names in groups that read the same rows, and how many are up to half of all.

    Half of the numbers of all weights, that is. Those groups come first that lose most for their size.
    """
    groups = {product.together: product.error or 0.0 for product in products.values()}
    sizes = {own: sum(math.prod(shapes[name]) for name in own) for own in groups}
    worst = sorted(groups, key=lambda own: -groups[own] / sizes[own])
    reached = list(accumulate(sizes[own] for own in worst))
    return worst, sum(2 * size <= reached[-1] for size in reached)


def find_fewest(is_close: Callable[[int], bool], most: int) -> int:
    """Return the smallest count up to `most` that is close, or `most` where none is."""
    count = low = 0
    while not is_close(count):
        if count == most:
            return most
        low = count + 1
        count = min(2 * count or 1, most)
    while low < count:
        middle = (low + count) // 2
        if is_close(middle):
            count = middle
        else:
            low = middle + 1
    return count
