"""Graphs in fp16: what of them stays in fp32, and what to run them on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from planforge.exporter.passes.weights import find_weight


def measure_fp32_share(graph: ir.Graph) -> float:
    """Return the share of the products' weights, in bytes, that are multiplied in fp32."""
    bytes_of = {ir.DataType.FLOAT: 0, ir.DataType.FLOAT16: 0}
    for node in graph:
        weight = node.inputs[1] if find_weight(node) is not None else None
        if weight is not None and weight.const_value is not None and weight.dtype in bytes_of:
            bytes_of[weight.dtype] += weight.const_value.nbytes
    return bytes_of[ir.DataType.FLOAT] / max(1, sum(bytes_of.values()))


def make_prefill(model: ir.Model, tokens: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
    """Return the inputs of a decoder's step over one row without a past, in any dialect."""
    count = len(tokens)
    given: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.array([tokens]),
        "attention_mask": np.ones((1, count), np.int64),
        "position_ids": np.arange(count)[None],
        "past_lengths": np.zeros(1, np.int32),
        "logit_rows": np.arange(count),
    }
    feeds = {}
    for value in model.graph.inputs:
        name = str(value.name)
        if name in given:
            feeds[name] = given[name]
            continue
        assert value.shape is not None and value.dtype is not None
        _, heads, _, size = value.shape
        assert isinstance(heads, int) and isinstance(size, int)
        slots = count if name.startswith("cache.") else 0
        feeds[name] = np.zeros((1, heads, slots, size), value.dtype.numpy())
    return feeds
