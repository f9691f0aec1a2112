"""Turns graphs in half precision into fp32: what their constants store stays, results have more bits."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .weights import EXTERNAL_FROM_BYTES, make_lazy_tensor

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def widen(model: ir.Model) -> bool:
    """Compute everything in fp32 that is in fp16 or bfloat16; return whether anything was.

    Each constant keeps its value, as fp32 has all of both. So do scales.
    """
    changed = False
    for graph in model.graphs():
        values = [*graph.inputs, *graph.initializers.values()]
        for node in graph:
            changed |= widen_attributes(node)
            values += node.outputs
        for value in values:
            if value.const_value is not None and value.const_value.dtype in HALVES:
                value.const_value = widen_tensor(value.const_value)
                changed = True
            if value.dtype in HALVES:
                value.type = ir.TensorType(ir.DataType.FLOAT)
                changed = True
    return changed


def widen_attributes(node: ir.Node) -> bool:
    """Let a node's attributes that name a type, or hold numbers, be of fp32; return whether any was not."""
    changed = False
    for name, attribute in list(node.attributes.items()):
        if name in ("to", "dtype", "output_dtype") and attribute.value in tuple(map(int, HALVES)):
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
        elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in HALVES:
            node.attributes[name] = ir.AttrTensor(name, widen_tensor(attribute.as_tensor()))
        else:
            continue
        changed = True
    return changed


def widen_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return a tensor's values in fp32; those of a large one are read when they are used."""
    name = str(tensor.name)
    if tensor.nbytes < EXTERNAL_FROM_BYTES:
        return ir.tensor(tensor.numpy().astype(np.float32), name=name)
    return make_lazy_tensor(tensor.numpy, tensor.shape.numpy(), np.dtype(np.float32), name)
