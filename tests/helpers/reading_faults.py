"""Faults to plant that only reading a graph shows in every precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from planforge.exporter.passes.store_rows import COLUMNS
from planforge.exporter.tracing.modules import find_module

from .faults import Plant, constant, node_of
from .graphs import nodes

MATRIX = {
    "MatMulNBits": 1,
    "GatherBlockQuantized": 0,
    "MatMulIntegerToFloat": 1,
    "DequantizeLinear": 0,
}  # where they read integers
SCALE = {"MatMulNBits": 2, "GatherBlockQuantized": 2, "MatMulIntegerToFloat": 3, "DequantizeLinear": 1}
Change = Callable[[npt.NDArray[Any]], None]


@dataclass(frozen=True)
class ReadFault:
    """A fault, the graph that it is planted in, and words of what reading must say of it."""

    name: str
    plant: Plant
    words: tuple[str, ...]
    missed: bool = False  # by versions that read weights in floats alone


def change_constant(node: ir.Node, index: int, change: Change) -> None:
    """Change what a node reads as a constant."""
    value = node.inputs[index]
    assert value is not None and value.const_value is not None
    array = value.const_value.numpy().copy()
    change(array)
    value.const_value = ir.tensor(array, name=value.name)


def quantized(model: ir.Model, module: str) -> ir.Node:
    return node_of(model, module, *MATRIX)


def doubled_scales(module: str, share: float = 0.0) -> Plant:
    """The scale of a block twice as large, or those of a share of all blocks."""

    def plant(model: ir.Model) -> None:
        def double(scale: npt.NDArray[Any]) -> None:
            count = max(1, round(share * scale.size))
            scale.reshape(-1)[np.random.default_rng(0).choice(scale.size, count, replace=False)] *= 2

        node = quantized(model, module)
        change_constant(node, SCALE[node.op_type], double)

    return plant


def changed_codes(module: str, change: Change) -> Plant:
    """Other integers."""

    def plant(model: ir.Model) -> None:
        node = quantized(model, module)
        change_constant(node, MATRIX[node.op_type], change)

    return plant


def exchanged_rows(one: int, other: int) -> Plant:
    """Two words of the table, with their scales, in each other's places."""

    def exchange(array: npt.NDArray[Any]) -> None:
        array[[one, other]] = array[[other, one]]

    def plant(model: ir.Model) -> None:
        table = nodes(model, "GatherBlockQuantized")[0]
        change_constant(table, 0, exchange)
        change_constant(table, 2, exchange)

    return plant


def word_is_nan(word: int) -> Plant:
    """The scale of a word's embedding is NaN."""

    def plant(model: ir.Model) -> None:
        def spoil(scale: npt.NDArray[Any]) -> None:
            scale[word] = np.nan

        change_constant(nodes(model, "GatherBlockQuantized")[0], 2, spoil)

    return plant


def own_vector(module: str, op_types: tuple[str, ...], index: int, factor: float = 1.004) -> Plant:
    """A vector that a node reads is 0.4 % off, under a name of its own."""

    def plant(model: ir.Model) -> None:
        node = node_of(model, module, *op_types)
        value = node.inputs[index]
        assert value is not None and value.const_value is not None
        array = value.const_value.numpy()
        node.replace_input_with(index, constant(model, "mine", (array * factor).astype(array.dtype)))

    return plant


def attribute(op_type: str, name: str, value: int | float, number: int = 1) -> Plant:
    """One attribute of one of several like nodes is another."""

    def plant(model: ir.Model) -> None:
        wrong = ir.AttrInt64(name, value) if isinstance(value, int) else ir.AttrFloat32(name, value)
        nodes(model, op_type)[number].attributes[name] = wrong

    return plant


def exact_gelu(model: ir.Model) -> None:
    """GELU as such instead of its form by tanh, which differs by 5e-4 at most."""
    for node in [node for node in model.graph if node.op_type in ("Gelu", "FastGelu")][:1]:
        inputs: list[ir.Value | None] = [node.inputs[0]]
        if len(node.inputs) > 1:
            add = ir.node("Add", [*node.inputs])
            add.outputs[0].type = node.outputs[0].type
            model.graph.insert_before(node, add)
            inputs = [add.outputs[0]]
        exact = ir.node("Gelu", inputs, {"approximate": "none"}, name="exact")
        exact.outputs[0].type = node.outputs[0].type
        exact.outputs[0].shape = node.outputs[0].shape
        exact.metadata_props.update(node.metadata_props)
        model.graph.insert_before(node, exact)
        ir.convenience.replace_all_uses_with(node.outputs[0], exact.outputs[0])
        model.graph.remove(node, safe=True)


def exchanged_columns(module: str) -> Plant:
    """Two results of an encoder's product in each other's places, with their scales."""

    def plant(model: ir.Model) -> None:
        node = quantized(model, module)

        def exchange(array: npt.NDArray[Any]) -> None:
            array[..., [0, 1]] = array[..., [1, 0]]

        change_constant(node, 1, exchange)
        change_constant(node, 3, exchange)

    return plant


def changed_unsmoothing(module: str) -> Plant:
    """What one column of an encoder's rows is multiplied by is 2 % off."""

    def plant(model: ir.Model) -> None:
        columns = quantized(model, module).inputs[1]
        assert columns is not None
        name = str(columns.name).partition(COLUMNS)[0] + ".unsmoothing"
        value = model.graph.initializers[name]
        assert value.const_value is not None
        array = value.const_value.numpy().copy()
        array[0] *= 1.02
        value.const_value = ir.tensor(array, name=name)

    return plant


def other_rotary_base(model: ir.Model) -> None:
    """An imported model's positions turn by powers of 10,100 instead of 10,000."""
    for value in list(model.graph.initializers.values()):
        tensor = value.const_value
        if tensor is not None and tensor.size > 1 and "rotary" in find_module(next(iter(value.uses())).node):
            array = tensor.numpy().astype(np.float64)
            other = array ** (np.log(10_100) / np.log(10_000))
            value.const_value = ir.tensor(other.astype(tensor.numpy().dtype), name=value.name)
            return
    raise AssertionError("no constant of positions")


def other_epsilon(*modules: str) -> Plant:
    """What some imported RMSNorms add under their roots is 1e-5 instead of 1e-6."""

    def plant(model: ir.Model) -> None:
        for module in modules:
            node = next(n for n in model.graph if find_module(n) == module and is_below_root(n))
            epsilon = node.inputs[1]
            assert epsilon is not None
            old = ir.convenience.get_const_tensor(epsilon)
            assert old is not None
            wrong = constant(model, f"wrong of {module}", np.array(1e-5, old.numpy().dtype))
            node.replace_input_with(1, wrong)

    return plant


def is_below_root(node: ir.Node) -> bool:
    """Tell whether a node adds to a mean, as the one of an RMSNorm's epsilon does."""
    value = node.inputs[0] if node.op_type == "Add" else None
    mean = None if value is None else value.producer()
    return mean is not None and mean.op_type == "ReduceMean"


def zero_points(module: str, other: int, rows: slice) -> Plant:
    """Some rows of a weight count from another number than the middle."""

    def plant(model: ir.Model) -> None:
        node = quantized(model, module)
        place = 5 if node.op_type == "MatMulIntegerToFloat" else 3
        scale = node.inputs[SCALE[node.op_type]]
        assert scale is not None and scale.shape is not None
        if place == 5:
            zeros = np.zeros(scale.shape.numpy()[-1:], np.int8)
        else:
            bits = node.attributes["bits"].as_int()
            N, blocks = scale.shape.numpy()
            zeros = np.full((N, -(-blocks * bits // 8)), 0x88 if bits == 4 else 128, np.uint8)
        zeros[rows] = other
        node.resize_inputs(max(place + 1, len(node.inputs)))
        flat = zeros if node.op_type == "GatherBlockQuantized" else zeros.reshape(-1)
        node.replace_input_with(place, constant(model, "zero_points", flat))

    return plant


def reads(module: str, index: int, parameter: str | None, *op_types: str) -> Plant:
    """A node reads another parameter of the model, or none."""

    def plant(model: ir.Model) -> None:
        other = None if parameter is None else model.graph.initializers[parameter]
        node_of(model, module, *op_types).replace_input_with(index, other)

    return plant


def other_id(word: int, other: int) -> Plant:
    """A word is read as another one."""

    def plant(model: ir.Model) -> None:
        table = next(n for n in nodes(model, "Gather") if n.inputs[1] in model.graph.inputs)
        ids = table.inputs[1]
        assert ids is not None and ids.dtype is not None
        kind = ids.dtype.numpy()
        equal = ir.node("Equal", [ids, constant(model, "word", np.array(word, kind))])
        chosen = ir.node("Where", [equal.outputs[0], constant(model, "other", np.array(other, kind)), ids])
        model.graph.insert_before(table, [equal, chosen])
        table.replace_input_with(1, chosen.outputs[0])

    return plant


def behind(module: str, op_type: str, extra: str, *numbers: float) -> Plant:
    """A node more behind a module's: it clips the result, or adds a number to it."""

    def plant(model: ir.Model) -> None:
        node = node_of(model, module, op_type)
        (result,) = node.outputs
        assert result.dtype is not None
        kind = result.dtype.numpy()
        users = list(result.uses())
        read = [constant(model, f"extra_{i}", np.array(x, kind)) for i, x in enumerate(numbers)]
        new = ir.node(extra, [result, *read], name="extra")
        new.outputs[0].type = result.type
        model.graph.insert_after(node, new)
        for user, index in users:
            user.replace_input_with(index, new.outputs[0])

    return plant


def scaled_number(module: str, op_type: str, factor: float) -> Plant:
    """The one number that a module's node computes with is another one."""

    def plant(model: ir.Model) -> None:
        for node in model.graph:
            for index, value in enumerate(node.inputs):
                number = ir.convenience.get_const_tensor(value) if value is not None else None
                is_meant = node.op_type == op_type and find_module(node) == module
                is_float = number is not None and number.dtype.is_floating_point()
                if is_meant and is_float and number is not None and number.size == 1:
                    wrong = (factor * number.numpy()).astype(number.numpy().dtype)
                    node.replace_input_with(index, constant(model, "wrong_number", wrong))
                    return
        raise AssertionError(f"no number of {module}")

    return plant


def summed_epsilon(module: str) -> Plant:
    """An epsilon is the sum of two constants, ten times as large."""

    def plant(model: ir.Model) -> None:
        node = node_of(model, module, "Add")
        epsilon = node.inputs[1]
        assert epsilon is not None
        number = ir.convenience.get_const_tensor(epsilon)
        assert number is not None
        array = number.numpy()
        rest = constant(model, "rest", (9 * array).astype(array.dtype))
        total = ir.node("Add", [epsilon, rest])
        total.outputs[0].type = epsilon.type
        model.graph.insert_before(node, total)
        node.replace_input_with(1, total.outputs[0])

    return plant
