"""Chooses which products of an encoder's plan read their rows in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..passes.int8_rows import RowProduct
from ..passes.quantize import QuantizedWeights
from .blocks import Measure, Trials

Array = npt.NDArray[np.float32]
Products = Mapping[tuple[str, ...], RowProduct]
FLOAT_BITS = 16  # of weights that stay as they are


def choose_static_products(
    begun: QuantizedWeights,
    products: Products,
    measures: Sequence[Measure],
    progress: Callable[[str], None],
) -> QuantizedWeights:
    """Return the weights with as many of these products as are close to the model.

    Where all of them lose too much, those of the largest error multiply floats, up to half of all weights:
    their weights alone are in int8, and in fp8, which loses more, they stay floats. Where nothing comes near
    to being close, all products stay.

    Args:
        begun: all weights, and how they are rounded by themselves.
        products: by the weight's name.
        measures: measure in PyTorch what a rounding loses, the quickest first and the most exact last.
        progress: called with a line for each trial.
    """
    shapes = {name: read().shape for name, read in begun.read.items()}
    trials = Trials(begun, shapes, measures, progress)
    format = begun.formats[begun.usual_bits]
    bits = FLOAT_BITS if format.uses_gptq else begun.usual_bits
    everything = mix(begun, products, {}, bits)
    for dropped in list_dropped(products, shapes):
        if trials.judge(mix(begun, products, dropped, bits), f"{len(dropped)} products read floats"):
            return trials.best
    return everything if trials.is_hopeless() else trials.best


def mix(begun: QuantizedWeights, products: Products, dropped: Products, bits: int) -> QuantizedWeights:
    """Return weights with products but for the dropped ones, whose weights have so many bits."""
    kept = {names: product for names, product in products.items() if names not in dropped}
    by_rows = {name for names in kept for name in names}
    alone = {name for names in dropped for name in names}
    own = {name: bits if name in alone else begun.usual_bits for name in begun.read if name not in by_rows}
    return replace(begun, bits=own, products=kept)


def list_dropped(products: Products, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Products]:
    """Yield none of the products, then the worst, and twice as many each time, up to half of the weights.

    Those that read the same rows belong together.
    """
    groups = {product.together: product.error or 0.0 for product in products.values()}
    worst = sorted(groups, key=lambda together: -groups[together])
    sizes = [sum(int(np.prod(shapes[name])) for name in together) for together in worst]
    count = 0
    while count <= len(worst) and sum(sizes[:count]) * 2 <= sum(sizes):
        chosen = set(worst[:count])
        yield {names: product for names, product in products.items() if product.together in chosen}
        count = 2 * count or 1
