"""Biases that depend on how far a token is behind another, such as T5's, as a table.

L the context's length, H heads, B batch, T tokens of this step, S tokens that they look at
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..errors import ExportError
from .attention import Attention
from .build import Array, Builder, evaluate, stand_in


def distance_tables(model: ir.Model, found: Sequence[Attention], length: int) -> list[Array | None]:
    """What each layer adds to its scores by distance, (L, H); None where it only masks.

    The graph itself is asked, once, by the last token of a full context. That nothing but the distance counts
    is what verification finds.

    Args:
        found: each layer's attention.
        length: L.

    Raises:
        ExportError: what is added has another shape.
    """
    names = list(dict.fromkeys(str(bias.name) for attention in found for bias in attention.biases))
    if not names:
        return [None] * len(found)

    (arrays,) = evaluate(model, names, lambda value: [stand_in(value, length - 1)])
    by_name = dict(zip(names, arrays, strict=True))
    tables: list[Array | None] = []
    for attention in found:
        total: Array = np.zeros((1, 1, 1, length), np.float32)
        for bias in attention.biases:
            total = total + by_name[str(bias.name)]
        if total.ndim != 4 or total.shape[0] != 1 or total.shape[2:] != (1, length):
            raise ExportError(f"what is added to the scores has the shape {total.shape}")
        table = np.ascontiguousarray(total[0, :, 0, ::-1].T)  # (L, H)
        tables.append(table if table.any() else None)
    return tables


def distance_bias(op: Builder, table: ir.Value, behind: ir.Value) -> ir.Value:
    """A table's entries for distances (B, T, S) as (B, H, T, S); tokens ahead count as the token itself."""
    found = op("Gather", table, op("Max", behind, op.constant(0)), axis=0)
    bias = op("Transpose", found, perm=[0, 3, 1, 2])
    return bias
