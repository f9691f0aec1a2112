"""Faults to plant in exported graphs: what real exporters, passes and people get wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from planforge.exporter.tracing.modules import find_module

Plant = Callable[[ir.Model], None]


@dataclass(frozen=True)
class Fault:
    """A fault, and where the search must find it.

    Attributes:
        name: in words.
        plant: puts it into a graph.
        module: the path of the PyTorch module that must be named; "" for nodes outside of all.
        op_types: one of them must be named.
    """

    name: str
    plant: Plant
    module: str
    op_types: tuple[str, ...]


def node_of(model: ir.Model, module: str, *op_types: str) -> ir.Node:
    """The first node of a module with one of these operators."""
    return next(n for n in model.graph if find_module(n) == module and n.op_type in op_types)


def weight_of(model: ir.Model, module: str) -> ir.Value:
    """The matrix that a module's product reads."""
    matrices = (v for v in node_of(model, module, "MatMul", "Gemm", "Conv").inputs if v is not None)
    return next(v for v in matrices if v.is_initializer())


def change_weight(
    value: ir.Value, change: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
) -> None:
    assert value.const_value is not None
    array = value.const_value.numpy()
    value.const_value = ir.tensor(change(array.astype(np.float64)).astype(array.dtype), name=value.name)


def constant(model: ir.Model, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    model.graph.register_initializer(value)
    return value


def transposed(module: str) -> Plant:
    """A square weight the wrong way round."""
    return lambda model: change_weight(weight_of(model, module), np.transpose)


def perturbed(*modules: str) -> Plant:
    """Weights that are 1 % off, each in its own direction."""

    def plant(model: ir.Model) -> None:
        random = np.random.default_rng(0)
        for module in modules:
            change_weight(
                weight_of(model, module), lambda w: w * (1 + 0.01 * random.choice([-1, 1], w.shape))
            )

    return plant


def coarse(module: str, factor: float = 1.1) -> Plant:
    """The scales of a quantized product too large."""

    def plant(model: ir.Model) -> None:
        scales = node_of(model, module, "MatMulNBits").inputs[2]
        assert scales is not None
        change_weight(scales, lambda scale: factor * scale)

    return plant


def epsilon(module: str, value: float) -> Plant:
    """Another number under the root of a normalisation."""

    def plant(model: ir.Model) -> None:
        node = node_of(model, module, "LayerNormalization", "InstanceNormalization")
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", value)

    return plant


def swapped(module: str, *op_types: str, index: int) -> Plant:
    """What two like nodes in a row read, keys and values, the wrong way round."""

    def plant(model: ir.Model) -> None:
        first, second = [n for n in model.graph if find_module(n) == module and n.op_type in op_types][:2]
        one = first.inputs[index]
        other = second.inputs[index]
        first.replace_input_with(index, other)
        second.replace_input_with(index, one)

    return plant


def no_mask(number: int = 0) -> Plant:
    """Everybody sees everything: padding, the future, or both."""

    def plant(model: ir.Model) -> None:
        where = [n for n in model.graph if n.op_type == "Where" and find_module(n) == ""][number]
        where.replace_input_with(2, where.inputs[1])

    return plant


def future_after_a_past(model: ir.Model) -> None:
    """Drops the causal mask of every step that has a past: a fault that no single prefill shows."""
    order = next(node for node in model.graph if node.op_type == "LessOrEqual")
    users = list(order.outputs[0].uses())
    past = next(v for v in model.graph.inputs if v.name == "past_key_values.0.key")
    length = ir.node("Shape", [past], {"start": 2, "end": 3})
    some = ir.node("Greater", [length.outputs[0], constant(model, "none", np.array(0))])
    both = ir.node("Or", [order.outputs[0], some.outputs[0]])
    model.graph.insert_after(order, [length, some, both])
    for user, index in users:
        user.replace_input_with(index, both.outputs[0])


def late_positions(module: str) -> Plant:
    """Each token has the place of the one before it."""

    def plant(model: ir.Model) -> None:
        gather = node_of(model, module, "Gather", "GatherND")
        one, zero = (constant(model, name, np.array(n)) for name, n in (("one", 1), ("zero", 0)))
        late = ir.node("Sub", [gather.inputs[1], one])
        floor = ir.node("Max", [late.outputs[0], zero])
        for node in (late, floor):
            node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        model.graph.insert_before(gather, [late, floor])
        gather.replace_input_with(1, floor.outputs[0])

    return plant


def scale_attribute(module: str, op_type: str) -> Plant:
    """Scores a tenth larger."""

    def plant(model: ir.Model) -> None:
        node = node_of(model, module, op_type)
        scale = node.attributes["scale"].as_float()
        node.attributes["scale"] = ir.AttrFloat32("scale", 1.1 * scale)

    return plant


def scale_factor(module: str, factor: float = 1.1) -> Plant:
    """Scores some times larger, where the scale is a constant."""

    def plant(model: ir.Model) -> None:
        node = node_of(model, module, "Mul")
        scale = node.inputs[1]
        assert scale is not None and scale.const_value is not None
        array = scale.const_value.numpy()
        wrong = constant(model, "wrong_scale", (factor * array).astype(array.dtype))
        node.replace_input_with(1, wrong)

    return plant


def low_mask(model: ir.Model) -> None:
    """A mask of -65504 and scores that reach -648: -inf in fp16, while ONNX Runtime computes in fp32."""
    where = next(n for n in model.graph if n.op_type == "Where" and find_module(n) == "")
    mask = where.inputs[2]
    assert mask is not None and mask.const_value is not None
    assert mask.const_value.numpy() == np.float16(-30000)
    where.replace_input_with(2, constant(model, "low", np.array(-65504, np.float16)))
    add = next(node for node, _ in where.outputs[0].uses())
    lower = ir.node("Add", [add.inputs[0], constant(model, "shift", np.array(-648, np.float16))])
    lower.outputs[0].type = ir.TensorType(ir.DataType.FLOAT16)
    model.graph.insert_before(add, lower)
    add.replace_input_with(0, lower.outputs[0])


def low_at_late_positions(first: int) -> Plant:
    """-65504 twice from a position on, where a mask hides it: -inf in fp16."""

    def plant(model: ir.Model) -> None:
        half = ir.TensorType(ir.DataType.FLOAT16)
        where = next(n for n in model.graph if n.op_type == "Where" and find_module(n) == "")
        positions = next(value for value in model.graph.inputs if value.name == "position_ids")
        late = ir.node("Greater", [positions, constant(model, "first", np.array(first))])
        wide = ir.node("Unsqueeze", [late.outputs[0], constant(model, "both", np.array([1, 3]))])
        zero, low = (constant(model, n, np.array(x, np.float16)) for n, x in (("none", 0), ("low", -65504)))
        lower = ir.node("Where", [wide.outputs[0], low, zero])
        twice = ir.node("Add", [lower.outputs[0], lower.outputs[0]], name="twice")
        nothing = ir.node("Max", [twice.outputs[0], constant(model, "least", np.array(0, np.float16))])
        added = ir.node("Add", [where.outputs[0], nothing.outputs[0]])
        for node in (lower, twice, nothing, added):
            node.outputs[0].type = half
        for node in (late, wide):
            node.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
        ir.convenience.replace_all_uses_with(where.outputs[0], added.outputs[0])
        added.replace_input_with(0, where.outputs[0])
        model.graph.insert_after(where, [late, wide, lower, twice, nothing, added])

    return plant


def low_padding(model: ir.Model) -> None:
    """-65504 twice on padding: -inf in fp16, but only where a batch has padding."""
    half = ir.TensorType(ir.DataType.FLOAT16)
    bools = ir.TensorType(ir.DataType.BOOL)
    where = next(n for n in model.graph if n.op_type == "Where" and find_module(n) == "")
    mask = next(value for value in model.graph.inputs if value.name == "attention_mask")
    cast = ir.node("Cast", [mask], {"to": int(ir.DataType.BOOL)})
    wide = ir.node("Unsqueeze", [cast.outputs[0], constant(model, "both", np.array([1, 2]))])
    zero, low = (constant(model, name, np.array(x, np.float16)) for name, x in (("none", 0), ("low", -65504)))
    lower = ir.node("Where", [wide.outputs[0], zero, low])
    total = ir.node("Add", [lower.outputs[0], lower.outputs[0]], name="twice")
    added = ir.node("Add", [where.outputs[0], total.outputs[0]])
    for node, kind in ((cast, bools), (wide, bools), (lower, half), (total, half), (added, half)):
        node.outputs[0].type = kind
    ir.convenience.replace_all_uses_with(where.outputs[0], added.outputs[0])
    added.replace_input_with(0, where.outputs[0])
    model.graph.insert_after(where, [cast, wide, lower, total, added])


def exchanged_weights(*modules: str) -> Plant:
    """Each of two products reads the other's matrix."""

    def plant(model: ir.Model) -> None:
        one, other = (node_of(model, module, "MatMul") for module in modules)
        first, second = one.inputs[1], other.inputs[1]
        one.replace_input_with(1, second)
        other.replace_input_with(1, first)

    return plant


def rescaled(cache: str, factor: float) -> Plant:
    """Steps of a cache some times as large: too coarse, or where smaller clipped."""

    def plant(model: ir.Model) -> None:
        change_weight(model.graph.initializers[f"{cache}.scale"], lambda scale: factor * scale)

    return plant


def swapped_scales(module: str) -> Plant:
    """The scales of keys for values, and the other way round."""

    def plant(model: ir.Model) -> None:
        node = node_of(model, module, "GroupQueryAttention")
        keys, values = node.inputs[12:14]
        node.replace_input_with(12, values)
        node.replace_input_with(13, keys)

    return plant


def exchanged_caches(which: str) -> Plant:
    """The keys or values of layer 0 are read for those of layer 1, and the other way round."""

    def plant(model: ir.Model) -> None:
        place = {"key": 3, "value": 4}[which]
        first, second = (node_of(model, f"h.{layer}.attn", "GroupQueryAttention") for layer in (0, 1))
        one, other = first.inputs[place], second.inputs[place]
        first.replace_input_with(place, other)
        second.replace_input_with(place, one)

    return plant
