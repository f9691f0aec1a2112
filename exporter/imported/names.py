"""Gives imported constants the names of the checkpoint's tensors that they equal."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ..passes.weights import EXTERNAL_FROM_BYTES, TRANSPOSED, Stored, make_lazy_tensor


def name_weights(model: ir.Model, tensors: Mapping[str, np.ndarray]) -> None:
    """Rename matrices, and large constants, that equal a tensor of the checkpoint, or its transpose.

    So every graph of a model shares a weight by its name, and quantization finds it in the PyTorch model.
    Other large constants are named by a hash of their content. An embedding's table that is transposed
    elsewhere is stored once.

    Args:
        tensors: the checkpoint's, by name; of two with the same numbers the first counts.
    """
    values = model.graph.initializers
    shapes = {tuple(value.shape.numpy()) for value in values.values() if value.shape is not None}
    stored = [(Stored(name), array) for name, array in tensors.items()]
    stored += [(Stored(name, transposed=True), array.T) for name, array in tensors.items() if array.ndim == 2]
    known: dict[tuple[tuple[int, ...], bytes], tuple[Stored, np.ndarray]] = {}
    for how, array in stored:
        if array.shape in shapes:
            known.setdefault(key_of(array), (how, array))
    for value in list(values.values()):
        constant = value.const_value
        if constant is None or constant.dtype != ir.DataType.FLOAT:
            continue
        is_large = constant.nbytes >= EXTERNAL_FROM_BYTES
        if not is_large and len(constant.shape) != 2:
            continue
        key = key_of(constant.numpy())
        if key in known:
            how, array = known[key]
            how.write(value)
            name = how.parameter + (TRANSPOSED if how.transposed else "")
            # The checkpoint's own array, so that it is in memory once.
            constant = make_lazy_tensor(lambda array=array: array, array.shape, array.dtype, name)  # type: ignore[misc]
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
    gathers = [node for node in graph if node.op_type == "Gather"]
    tables = {id(v): v for v in (node.inputs[0] for node in gathers) if v is not None and is_large_matrix(v)}
    for table in tables.values():
        turned = tuple(reversed(shape_of(table)))
        alike = [v for v in graph.initializers.values() if is_large_matrix(v) and shape_of(v) == turned]
        for value in alike:
            if id(value) in tables or key_of(array_of(value)) != key_of(array_of(table).T):
                continue
            transpose = ir.node("Transpose", [table], {"perm": [1, 0]}, name=f"{value.name}/tied")
            (result,) = transpose.outputs
            result.name = f"{value.name}/tied"
            result.type = value.type
            result.shape = value.shape
            graph.insert_before(graph[0], transpose)
            ir.convenience.replace_all_uses_with(value, result)
            del graph.initializers[str(value.name)]


def is_large_matrix(value: ir.Value) -> bool:
    constant = value.const_value
    return (
        constant is not None
        and constant.dtype == ir.DataType.FLOAT
        and len(constant.shape) == 2
        and constant.nbytes >= EXTERNAL_FROM_BYTES
    )


def shape_of(value: ir.Value) -> tuple[int, ...]:
    assert value.const_value is not None
    return tuple(value.const_value.shape.numpy())


def array_of(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()


def key_of(array: np.ndarray) -> tuple[tuple[int, ...], bytes]:
    return array.shape, hashlib.sha256(np.ascontiguousarray(array).data).digest()
