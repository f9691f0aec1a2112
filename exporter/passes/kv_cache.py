"""Stores keys and values in int8: GroupQueryAttention rounds them when writing, and reads them as int8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from .weights import add_initializer

KEY_SCALE = 12  # the input of GroupQueryAttention; the values' follows


def quantize_cache(model: ir.Model, scales: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Make every cache int8, with the scales (H * D,), float32, of its input, such as "cache.0.key"."""
    graph = model.graph
    for node in graph:
        if node.op_type != "GroupQueryAttention":
            continue
        caches = [value for value in node.inputs[3:5] if value is not None]
        node.resize_inputs(KEY_SCALE + len(caches))
        for i, (cache, present) in enumerate(zip(caches, node.outputs[1:], strict=True)):
            assert cache.name is not None
            scale = ir.tensor(scales[cache.name], name=f"{cache.name}.scale")
            node.replace_input_with(KEY_SCALE + i, add_initializer(graph, str(scale.name), scale))
            cache.type = present.type = ir.TensorType(ir.DataType.INT8)
        for kind in ("k", "v"):
            node.attributes[f"{kind}_quant_type"] = ir.AttrString(f"{kind}_quant_type", "PER_CHANNEL")
        node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", 8)


def list_cache_scales(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value, ir.Value | None]]:
    """Yield the nodes that read a cache in int8, with the cache and its scales."""
    for node in graph:
        if node.op_type == "GroupQueryAttention" and len(node.inputs) >= KEY_SCALE + 2:
            for cache, scale in zip(node.inputs[3:5], node.inputs[KEY_SCALE:], strict=False):
                if cache is not None:
                    yield node, cache, scale
