"""Passes that give a traced graph its weights, and write them once for all graphs of a precision."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

if TYPE_CHECKING:
    from torch import Tensor

MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
STORED = "planforge.stored"  # a constant's metadata: which parameter it holds and how, as JSON
DESCRIBED = "planforge.metadata"  # a graph's metadata: constants and nodes have the rest of it
# Names that graphs share say how a parameter is stored too, so that equal names mean equal numbers.
TRANSPOSED = ".transposed"
SCALED = ".times2^-"
HALVED = "_fp16"
ROWS = ".rows."
EXTERNAL_FROM_BYTES = 1024  # smaller constants stay inside the .onnx, where a reader sees them
# G of F(2, 3) in Lavin and Gray, 2015: what the weights of a row of three count at each point of a tile.
WINOGRAD = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0.0, 0.0, 1.0))
PIECE_BYTES = 2**24  # of a parameter that are converted and written at a time

Array = npt.NDArray[Any]
T = TypeVar("T")
R = TypeVar("R")


def attach_parameters(
    model: ir.Model, parameters: Mapping[str, Tensor], transposed: Collection[str] | None = None
) -> None:
    """Turn the inputs that carry a parameter's name into initializers with its values.

    A parameter that the graph only reads transposed is stored transposed, so that no engine has to
    turn it round, and hold it twice, while loading. A tensor that has several names in the model gets
    the first of them in every graph, and one that is transposed has a name of its own: graphs that
    share a weights file must mean the same by a name. `parameters` has tensors by all of their names; those
    in a half precision become fp32. `transposed` names those that other graphs store transposed, where this
    one shares their file: a gradient reads most weights both ways.
    """
    graph = model.graph
    names: dict[int, str] = {}
    for name, tensor in parameters.items():
        names.setdefault(id(tensor), name)
    for value in [value for value in graph.inputs if value.name in parameters]:
        tensor = parameters[str(value.name)]
        graph.inputs.remove(value)
        value.name = names[id(tensor)]
        readers = list(dict.fromkeys(node for node, _ in value.uses()))
        transposes = [node for node in readers if is_matrix_transpose(node)]
        is_transposed = bool(readers) and len(transposes) == len(readers)
        if transposed is not None:
            is_transposed = value.name in transposed
        if is_transposed:
            if len(transposes) < len(readers):
                insert_transpose(graph, value, [node for node in readers if node not in transposes])
            ParameterRef(value.name, transposed=True).write(value)
            value.name += TRANSPOSED
            value.shape = ir.Shape(tensor.T.shape)
            for node in transposes:
                ir.convenience.replace_all_uses_with(node.outputs[0], value)
                graph.remove(node, safe=True)
        value.const_value = ParameterTensor(tensor, value.name, is_transposed)
        graph.register_initializer(value)
    model.metadata_props[DESCRIBED] = "1"


def insert_transpose(graph: ir.Graph, value: ir.Value, readers: Sequence[ir.Node]) -> None:
    """Let nodes read the transpose of a constant, which is about to be stored transposed."""
    first = next(node for node in graph if node in readers)
    node = ir.node("Transpose", [value], {"perm": [1, 0]}, name=f"{value.name}/turned_back")
    graph.insert_before(first, node)
    turned = node.outputs[0]
    turned.name = f"{value.name}.turned_back"
    turned.shape = value.shape
    turned.type = value.type
    for reader in readers:
        for index, read in enumerate(reader.inputs):
            if read is value:
                reader.replace_input_with(index, turned)


def list_transposed(model: ir.Model) -> set[str]:
    """Return the names of the parameters that a graph stores transposed."""
    constants = (ParameterRef.read(value) for value in model.graph.initializers.values())
    return {stored.parameter for stored in constants if stored.transposed}


class ParameterTensor(ir.LazyTensor):
    """A parameter of PyTorch, made contiguous and fp32 only while it is read, and written piece by piece.

    So the weights of a checkpoint in half precision, which stay in its files, are never in memory as a whole.
    What is read is what the parameter holds then: its data may be exchanged for the same numbers elsewhere.
    """

    def __init__(self, parameter: Tensor, name: str, transposed: bool = False) -> None:
        self.parameter = parameter
        self.transposed = transposed
        tensor = self.view()
        empty = read_array(tensor[:0] if tensor.dim() else tensor)
        super().__init__(
            lambda: ir.tensor(read_array(self.view())),
            dtype=ir.DataType.from_numpy(empty.dtype),
            shape=ir.Shape(tensor.shape),
            name=name,
        )

    def view(self) -> Tensor:
        """Return the parameter's current value, in the form that is stored."""
        return self.parameter.T if self.transposed else self.parameter

    def tofile(self, file: Any) -> None:
        """Write the numbers to a binary file, `PIECE_BYTES` of them at a time."""
        tensor = self.view()
        if not tensor.dim():
            super().tofile(file)
            return
        step = max(1, PIECE_BYTES * len(tensor) // max(1, self.nbytes))
        for first in range(0, len(tensor), step):
            ir.Tensor(read_array(tensor[first : first + step])).tofile(file)


class LazyMapping(Mapping[str, R], Generic[T, R]):
    """Arrays or similar values by name, each computed from its stored form when it is asked for."""

    def __init__(self, stored: Mapping[str, T], read: Callable[[T], R]) -> None:
        self._stored = stored
        self._read = read

    def __getitem__(self, name: str) -> R:
        return self._read(self._stored[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def read_array(tensor: Tensor) -> Array:
    """Return a tensor's numbers, contiguous, and in fp32 where they are in a half precision."""
    tensor = tensor.detach()
    is_half = tensor.is_floating_point() and tensor.element_size() < 4
    return np.asarray((tensor.float() if is_half else tensor).numpy(), order="C")


def is_described(model: ir.Model) -> bool:
    """Tell whether metadata says what a graph's constants store; in the first bundles, their names did."""
    return DESCRIBED in model.metadata_props


@dataclass(frozen=True)
class ParameterRef:
    """The way in which a graph's constant stores a parameter."""

    parameter: str  # its name
    transposed: bool = False  # the constant is its transpose
    shift: int = 0  # the constant is it times 2**-shift
    first: int | None = None  # the constant is its rows from this one on; None for all of them
    # The constant has its kernels (K, C) of 3 x 3 at this point of Winograd's domain.
    point: Sequence[int] | None = None

    @classmethod
    def read(cls, value: ir.Value) -> ParameterRef:
        """Return the reference in a constant's metadata; without any, to the parameter of its name."""
        text = value.metadata_props.get(STORED)
        return cls(str(value.name)) if text is None else cls(**json.loads(text))

    def write(self, value: ir.Value) -> None:
        """Keep this reference in a constant's metadata."""
        value.metadata_props[STORED] = json.dumps(vars(self))

    def of(self, array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Return the part of a parameter that a tensor of this shape stores, before it gets its type."""
        if self.point is not None:
            array = transform_kernels(array, *self.point)
        array = array.T if self.transposed else array
        array = np.ldexp(array, -self.shift) if self.shift else array
        return array if self.first is None else array[self.first : self.first + shape[0]]


def transform_kernels(kernels: np.ndarray, i: int, j: int) -> np.ndarray:
    """Return kernels (K, C, 3, 3) at a point of Winograd's domain: (K, C), in float64."""
    found: Array = np.zeros(kernels.shape[:2])
    for a, down in enumerate(WINOGRAD[i]):
        for b, right in enumerate(WINOGRAD[j]):
            if down and right:
                found += down * right * kernels[:, :, a, b]
    return found


def is_matrix_transpose(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and list(node.attributes["perm"].as_ints()) == [1, 0]


def make_lazy_tensor(
    read: Callable[[], np.ndarray], shape: Sequence[int], dtype: np.dtype, name: str
) -> ir.LazyTensor:
    """Return a tensor that is read, made contiguous and converted only while it is written."""
    return ir.LazyTensor(
        # With its shape, as what has none gets (1,).
        lambda: ir.tensor(np.ascontiguousarray(read(), dtype=dtype).reshape(shape)),
        dtype=ir.DataType.from_numpy(dtype),
        shape=ir.Shape(shape),
        name=name,
    )


@dataclass(frozen=True)
class Weight:
    """The constant factor of a product."""

    name: str  # the parameter's
    rows: int  # N, the width of the result
    array: Callable[[], np.ndarray]  # gives its numbers (N, K)
    constant: ir.Value | None  # (N, K) as it is stored; None where its transpose is
    bias: ir.Value | None = None  # (N,), if it is a part of the node


def find_weight(node: ir.Node) -> Weight | None:
    """Return the weight of a MatMul or a plain Gemm, or None if it is not a constant matrix."""
    if node.op_type not in ("MatMul", "Gemm") or (value := node.inputs[1]) is None:
        return None
    plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
    if any(name in node.attributes and node.attributes[name].value != plain[name] for name in plain):
        return None
    by_rows = False
    bias = None
    if node.op_type == "Gemm":
        by_rows = node.attributes.get_int("transB", 0) == 1
        bias = node.inputs[2] if len(node.inputs) > 2 else None
    producer = value.producer()
    if producer is not None and is_matrix_transpose(producer) and producer.inputs[0] is not None:
        value = producer.inputs[0]
        by_rows = not by_rows
    constant = value.const_value
    if constant is None or len(constant.shape) != 2:
        return None
    rows, columns = constant.shape.numpy()
    if by_rows:
        return Weight(str(value.name), rows, constant.numpy, value, bias)
    return Weight(ParameterRef.read(value).parameter, columns, lambda: constant.numpy().T, None, bias)


class View(ir.LazyTensor):
    """A part of a tensor's bytes, from a row on, with its own shape; it takes no extra room in a file."""

    def __init__(self, base: ir.TensorProtocol, first: int, shape: Sequence[int]) -> None:
        self.base = base
        self.offset = first * (base.nbytes // base.shape.numpy()[0])

        def read() -> ir.TensorProtocol:
            seen = base.numpy()[first:].reshape(-1)[: int(np.prod(shape))]
            return ir.tensor(seen.reshape(shape))

        super().__init__(read, dtype=base.dtype, shape=ir.Shape(shape), name=base.name)


def add_initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Return a constant of the graph, which is added once per name."""
    if name not in graph.initializers:
        shape = ir.Shape(tensor.shape.numpy())
        value = ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]


def add_rows(graph: ir.Graph, constant: ir.Value, first: int, count: int) -> ir.Value:
    """Add some rows of a constant as a constant of their own, stored as a part of it in the file."""
    tensor = constant.const_value
    assert tensor is not None
    view = View(tensor, first, (count, *tensor.shape.numpy()[1:]))
    rows = add_initializer(graph, f"{constant.name}{ROWS}{first}", view)
    replace(ParameterRef.read(constant), first=first).write(rows)
    return rows


def save_with_shared_weights(
    models: Mapping[str, ir.Model],
    folder: Path,
    data_name: str,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write graphs as `folder`/KEY and their large weights, each once, as `folder`/`data_name`.

    Initializers of one name and type hold the same values in all graphs. `report` is told how many bytes of
    weights are written, and how many there are.
    """
    values = [value for model in models.values() for value in model.graph.initializers.values()]
    constants = [value for value in values if value.const_value is not None]
    large = [value for value in constants if find_base(value).nbytes >= EXTERNAL_FROM_BYTES]
    tensors: dict[tuple[str, ir.DataType], ir.TensorProtocol] = {}
    for value in large:
        tensors.setdefault(key_of(value), find_base(value))
    total = sum(tensor.nbytes for tensor in tensors.values())
    external = ir.external_data.convert_tensors_to_external(
        list(tensors.values()),
        base_dir=folder,
        relative_path=data_name,
        callback=lambda tensor, info: report(info.offset, total),  # they lie one behind the other
    )
    report(total, total)
    written = dict(zip(tensors, external, strict=True))
    for value in large:
        stored = written[key_of(value)]
        if isinstance(value.const_value, View):
            assert isinstance(stored, ir.ExternalTensor)
            view = value.const_value
            stored = ir.ExternalTensor(
                stored.location,
                (stored.offset or 0) + view.offset,
                view.nbytes,
                view.dtype,
                shape=ir.Shape(view.shape),
                name=str(view.name),
                base_dir=stored.base_dir,
            )
        value.const_value = stored
    for name, model in models.items():
        ir.save(model, folder / name)


def find_base(value: ir.Value) -> ir.TensorProtocol:
    """Return the tensor whose bytes are stored for a constant."""
    assert value.const_value is not None
    return value.const_value.base if isinstance(value.const_value, View) else value.const_value


def key_of(value: ir.Value) -> tuple[str, ir.DataType]:
    base = find_base(value)
    name = base.name if isinstance(value.const_value, View) else value.name
    assert name is not None
    return name, base.dtype
