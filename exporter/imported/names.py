"""Gives imported constants the names of the checkpoint's tensors that they equal."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial

import numpy as np
import onnx_ir as ir

from ..passes.build import Builder
from ..passes.weights import EXTERNAL_FROM_BYTES, TRANSPOSED, ParameterRef, make_lazy_tensor


def name_weights(model: ir.Model, tensors: Mapping[str, np.ndarray]) -> None:
    """Rename matrices, and large constants, that equal a tensor of the checkpoint, or its transpose.

    So every graph of a model shares a weight by its name, and quantization finds it in the PyTorch model.
    Of two tensors with the same numbers the first counts. Other large constants are named by a hash of their
    content. An embedding's table that is transposed elsewhere is stored once.
    """
    values = model.graph.initializers
    shapes = {tuple(value.shape.numpy()) for value in values.values() if value.shape is not None}
    stored = [(ParameterRef(name), array) for name, array in tensors.items()]
    stored += [
        (ParameterRef(name, transposed=True), array.T) for name, array in tensors.items() if array.ndim == 2
    ]
    known: dict[tuple[tuple[int, ...], bytes], tuple[ParameterRef, np.ndarray]] = {}
    for how, array in stored:
        if array.shape in shapes:
            known.setdefault(hash_array(array), (how, array))
    for value in list(values.values()):
        constant = value.const_value
        if constant is None or constant.dtype != ir.DataType.FLOAT:
            continue
        is_large = constant.nbytes >= EXTERNAL_FROM_BYTES
        if not is_large and len(constant.shape) != 2:
            continue
        key = hash_array(constant.numpy())
        if key in known:
            how, array = known[key]
            how.write(value)
            name = how.parameter + (TRANSPOSED if how.transposed else "")
            # The checkpoint's own array, so that it is in memory once.
            constant = make_lazy_tensor(partial(np.asarray, array), array.shape, array.dtype, name)
            value.const_value = constant
        else:
            name = f"weight.{key[1].hex()[:16]}" if is_large else str(value.name)
        if name == value.name:
            continue
        del values[str(value.name)]
        if name in values:
            ir.convenience.replace_all_uses_with(value, values[name])
        else:
            value.name = constant.name = name
            model.graph.register_initializer(value)
    tie_tables(model)


def tie_tables(model: ir.Model) -> None:
    """Replace a matrix that is an embedding's table transposed, such as a tied head, by a Transpose of it."""
    graph = model.graph
    large = {
        value: value.const_value
        for value in graph.initializers.values()
        if value.const_value is not None
        and value.const_value.dtype == ir.DataType.FLOAT
        and len(value.const_value.shape) == 2
        and value.const_value.nbytes >= EXTERNAL_FROM_BYTES
    }
    looked_up = {node.inputs[0] for node in graph if node.op_type == "Gather"}
    for table in [value for value in large if value in looked_up]:
        turned = large[table].shape.numpy()[::-1]
        for value in [value for value in large if value not in looked_up]:
            matrix = large[value]
            if matrix.shape.numpy() != turned or not np.array_equal(matrix.numpy(), large[table].numpy().T):
                continue
            tied = Builder(graph, graph[0], f"{value.name}/tied")("Transpose", table, perm=[1, 0])
            tied.shape = value.shape
            ir.convenience.replace_all_uses_with(value, tied)
            del graph.initializers[str(value.name)]


def hash_array(array: np.ndarray) -> tuple[tuple[int, ...], bytes]:
    return array.shape, hashlib.sha256(np.ascontiguousarray(array).data).digest()
