"""Chooses how large the blocks of int8 and int4 weights may be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import ExportError
from ..limits import CAPS, COUNTED, Gaps
from ..passes.quantize import BLOCK_SIZES, Blocks, Dequantized, find_products, find_quantizable, quantize

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import nn

    from ..reference.rounding import Rounding

log = logging.getLogger("planforge")

Array = npt.NDArray[np.float32]

# Shares of the caps that weights alone may take; the rest is for what activations lose. Counted words are
# coarse: where no block keeps them, the gate will say so, and the largest that is close otherwise will do.
SHARE = 0.5
COUNTED_SHARE = 0.9
FAR, COUNTS_APART, CLOSE = range(3)


@dataclass(frozen=True)
class QuantizedWeights:
    """A model's weights in int8 or int4."""

    size: int  # columns of a block
    done: dict[str, Blocks]  # the quantized weights by parameter name


def select_known_weights(graphs: Iterable[ir.Model], model: nn.Module) -> dict[str, Callable[[], Array]]:
    """Return the weights (N, K) that are quantized and that PyTorch can round as well, by name.

    An imported graph may hold others, such as a matrix that was folded with a scale. They are quantized
    too, as they come; how much that loses only the comparison of the graph shows.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights = dict(found for graph in graphs for found in find_quantizable(graph.graph))
    if unknown := [name for name in weights if name not in parameters]:
        log.warning(
            "%d of %d weights are no parameter of the model in PyTorch, such as %s: they are rounded, but not"
            " chosen by how much that loses",
            len(unknown),
            len(weights),
            name_product(graphs, unknown[0]),
        )
    return {name: read for name, read in weights.items() if name in parameters}


def name_product(graphs: Iterable[ir.Model], weight: str) -> str:
    """Return a weight's name with the node that multiplies by it, for a message."""
    found = [(node, own.name) for graph in graphs for node, own in find_products(graph.graph)]
    nodes = [str(node.name) for node, name in found if name == weight]
    return f"{weight!r} of node {nodes[0]!r}" if nodes else repr(weight)


def choose_blocks(
    weights: Mapping[str, Callable[[], Array]],
    bits: int,
    rows: Mapping[str, Array],
    gaps: Callable[[Rounding], Gaps],
    tables: Collection[str] = (),
) -> QuantizedWeights:
    """Return the largest blocks that are close, with tables in int8 where none is close with int4 tables.

    Weights are given by functions, as (N, K), with the `rows` that they read; `tables` are looked up, and
    `gaps` measures in PyTorch what a rounding loses.
    """
    from ..reference.rounding import Rounding

    widths = {name: read().shape[1] for name, read in weights.items()}
    for name, width in widths.items():
        if width % BLOCK_SIZES[-1]:
            raise ExportError(
                f"int{bits} keeps weights in blocks of {BLOCK_SIZES[-1]} columns or more, and the width"
                f" {width} of {name} is not a multiple of {BLOCK_SIZES[-1]}; export fp32 or fp16"
            )
    fitting = [size for size in BLOCK_SIZES if all(width % size == 0 for width in widths.values())]
    caps = CAPS[f"int{bits}"]

    def quantize_all(table_bits: int, size: int, rows: Mapping[str, Array]) -> QuantizedWeights:
        done = {}
        for name, read in weights.items():
            own, seen = (table_bits, None) if name in tables else (bits, rows.get(name))
            done[name] = quantize(read(), own, size, seen)
        return QuantizedWeights(size, done)

    tables_bits = (bits, 8) if tables and bits != 8 else (bits,)
    choices = [(table_bits, size) for table_bits in tables_bits for size in fitting]
    best = FAR
    for choice in choices:  # tried without GPTQ, which takes long and only brings products closer
        found = quantize_all(*choice, {})
        now = judge_closeness(gaps(Rounding(weights=Dequantized(found.done))), caps)
        if now > best or best == FAR:  # where none is close, the last
            chosen = choice
            nearest = found
            best = now
        if best == CLOSE:
            break
    return quantize_all(*chosen, rows) if rows else nearest


def judge_closeness(gaps: Gaps, caps: Mapping[str, float]) -> int:
    """Return `CLOSE`, or `COUNTS_APART` where only counted words are not, or `FAR`."""
    shares = [
        (name in COUNTED, getattr(gap, name) / caps[name]) for gap in gaps.values() for name in gap.LIMITED
    ]
    if not all(share <= SHARE for counted, share in shares if not counted):  # NaN is far
        return FAR
    return CLOSE if all(share <= COUNTED_SHARE for counted, share in shares if counted) else COUNTS_APART
