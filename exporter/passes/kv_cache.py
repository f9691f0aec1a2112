"""Keys and values in int8: GroupQueryAttention rounds them as it writes them, and reads them so."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from .weights import add_initializer

KEY_SCALE = 12  # the input of GroupQueryAttention; the values' follows


class QuantizeCache(ir.passes.InPlacePass):
    """Makes every cache int8, with a scale for each head and channel.

    Args:
        scales: (H * D,) float32 by the cache's input, such as "cache.0.key".
    """

    def __init__(self, scales: Mapping[str, npt.NDArray[np.float32]]) -> None:
        super().__init__()
        self.scales = scales

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        for node in graph:
            if node.op_type != "GroupQueryAttention":
                continue
            caches = [value for value in node.inputs[3:5] if value is not None]
            missing = KEY_SCALE - len(node.inputs)
            node.resize_inputs(len(node.inputs) + missing + len(caches))
            for i, (cache, present) in enumerate(zip(caches, node.outputs[1:], strict=True)):
                assert cache.name is not None
                scale = ir.tensor(self.scales[cache.name], name=f"{cache.name}.scale")
                node.replace_input_with(KEY_SCALE + i, add_initializer(graph, str(scale.name), scale))
                cache.type = present.type = ir.TensorType(ir.DataType.INT8)
            for kind in ("k", "v"):
                node.attributes[f"{kind}_quant_type"] = ir.AttrString(f"{kind}_quant_type", "PER_CHANNEL")
            node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", 8)
        return ir.passes.PassResult(model, modified=True)
