"""Passes that give a traced graph its weights, and write them once for all graphs of a precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from torch import Tensor

EXTERNAL_FROM_BYTES = 1024  # smaller constants stay inside the .onnx, where a reader sees them


class AttachWeights(ir.passes.InPlacePass):
    """Turns the inputs that carry a parameter's name into initializers with its values.

    A parameter that the graph only reads transposed is stored transposed, so that no engine has to
    turn it round, and hold it twice, while loading. A tensor that has several names in the model gets
    the first of them in every graph, and one that is transposed has a name of its own: graphs that
    share a weights file must mean the same by a name.

    Args:
        parameters: tensors by all of their names.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.parameters = parameters
        self.names: dict[int, str] = {}
        for name, tensor in parameters.items():
            self.names.setdefault(id(tensor), name)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        weights = [value for value in graph.inputs if value.name in self.parameters]
        for value in weights:
            assert value.name is not None
            tensor = self.parameters[value.name]
            array = tensor.detach().numpy()
            graph.inputs.remove(value)
            value.name = self.names[id(tensor)]
            transposes = [node for node, _ in value.uses()]
            if transposes and all(is_matrix_transpose(node) for node in transposes):
                array = array.T
                value.name += ".transposed"
                value.shape = ir.Shape(array.shape)
                for node in transposes:
                    ir.convenience.replace_all_uses_with(node.outputs[0], value)
                    graph.remove(node, safe=True)
            value.const_value = lazy(lambda array=array: array, array.shape, array.dtype, value.name)  # type: ignore[misc]
            graph.register_initializer(value)
        return ir.passes.PassResult(model, modified=bool(weights))


def is_matrix_transpose(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and list(node.attributes["perm"].as_ints()) == [1, 0]


def lazy(read: Callable[[], np.ndarray], shape: Sequence[int], dtype: np.dtype, name: str) -> ir.LazyTensor:
    """A tensor that is read, made contiguous and converted only while it is written."""
    return ir.LazyTensor(
        lambda: ir.tensor(np.ascontiguousarray(read(), dtype=dtype)),
        dtype=ir.DataType.from_numpy(dtype),
        shape=ir.Shape(shape),
        name=name,
    )


def save_with_shared_weights(models: Mapping[str, ir.Model], folder: Path, data_name: str) -> None:
    """Writes graphs as `folder`/KEY and their large weights, each once, as `folder`/`data_name`.

    Args:
        models: graphs whose initializers of one name and type hold the same values.
    """
    tensors: dict[tuple[str, ir.DataType], ir.TensorProtocol] = {}
    for value in large_initializers(models.values()):
        tensors.setdefault(key_of(value), value.const_value)  # type: ignore[arg-type]
    external = ir.external_data.convert_tensors_to_external(
        list(tensors.values()), base_dir=folder, relative_path=data_name
    )
    written = dict(zip(tensors, external, strict=True))
    for value in large_initializers(models.values()):
        value.const_value = written[key_of(value)]
    for name, model in models.items():
        ir.save(model, folder / name)


def large_initializers(models: Iterable[ir.Model]) -> list[ir.Value]:
    return [
        value
        for model in models
        for value in model.graph.initializers.values()
        if value.const_value is not None and value.const_value.nbytes >= EXTERNAL_FROM_BYTES
    ]


def key_of(value: ir.Value) -> tuple[str, ir.DataType]:
    assert value.name is not None and value.const_value is not None
    return value.name, value.const_value.dtype
