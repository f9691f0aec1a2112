"""The fp16 pass: a float32 graph becomes mixed precision, with every type written in the graph.

Types in the graph, not a builder's flag: TensorRT 11 and TensorRT-RTX take nothing else, and what was
verified is what is built.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from .fp16_ranges import FP16_MAX, FP32, Fp32Reason, choose_fp32_nodes, find_magnitude
from .static_rows import list_rounding
from .weights import HALVED, SCALED, ParameterRef, add_initializer, make_lazy_tensor

FLOAT = ir.DataType.FLOAT
HALF = ir.DataType.FLOAT16
NAMES = {FLOAT: "fp32", HALF: "fp16"}
FP32_INPUTS = {"Resize": (2,)}  # scales, which ONNX takes in fp32 alone

Casts = dict[tuple[ir.Value, ir.DataType], ir.Value]


def convert_to_fp16(
    model: ir.Model, fp32_values: Collection[str], choices: Mapping[str, Fp32Reason] | None = None
) -> None:
    """Compute in fp16, but for chosen nodes; casts stand where the precision changes.

    `fp32_values` are outputs such as logits, and inputs such as latents; other float inputs and outputs
    (caches) become fp16. `choices` are the nodes that stay in fp32, or are scaled, by name; without them,
    sums and the nodes whose constants fp16 cannot hold.
    """
    graph = model.graph
    if untyped := [value.name for value in list_values(graph) if value.dtype is None]:
        raise ValueError(f"these values have no type, so no precision can be chosen: {untyped}")
    for number, node in enumerate(graph):
        node.name = node.name or f"{node.op_type}_{number}"
    chosen = dict(choose_fp32_nodes(graph, {}) if choices is None else choices)
    for node in [node for node in graph if node.name in chosen]:
        choice = chosen[str(node.name)]
        if (reader := find_reader_of_codes(node)) is not None:  # a weight may be beyond fp16 as well
            choice = replace(choice, shift=None)
            together = (node, reader, *list_rounding(node))
            chosen |= {str(one.name): choice for one in together}
        choice.write(node)
        if choice.shift is not None:
            del chosen[str(node.name)]
            multiplied = scale_product(graph, node, choice.shift)
            chosen[str(multiplied.name)] = choice
    was_float = {value for value in list_values(graph) if value.dtype == FLOAT}
    casts: Casts = {}
    for value in graph.inputs:
        if value in was_float and value.name not in fp32_values:
            value.type = ir.TensorType(HALF)  # a new one: clones of a graph share theirs
    for node in list(graph):
        precision = FLOAT if str(node.name) in chosen else HALF
        for index, read in enumerate(node.inputs):
            if read is not None and read in was_float and index not in FP32_INPUTS.get(node.op_type, ()):
                node.replace_input_with(index, convert_value(casts, read, precision, node))
        for output in node.outputs:
            if output in was_float:
                output.type = ir.TensorType(precision)
        retype_attributes(node, precision)
    for index, value in enumerate(graph.outputs):
        wanted = FLOAT if value.name in fp32_values else HALF
        if value in was_float and value.dtype != wanted:
            graph.outputs[index] = cast_output(graph, value, wanted)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def convert_value(casts: Casts, value: ir.Value, dtype: ir.DataType, user: ir.Node) -> ir.Value:
    """Return `value` as `dtype`: itself, a converted constant, or the result of a Cast that users share."""
    if value.dtype == dtype:
        return value
    if (value, dtype) not in casts:
        assert isinstance(user.graph, ir.Graph)
        if value.const_value is not None:
            casts[value, dtype] = convert_constant(value)  # constants begin as fp32
            user.graph.register_initializer(casts[value, dtype])
        else:
            cast = make_cast(value, dtype)
            user.graph.insert_before(user, cast)
            casts[value, dtype] = cast.outputs[0]
    return casts[value, dtype]


def scale_product(graph: ir.Graph, product: ir.Node, shift: int) -> ir.Node:
    """Multiply by weights of 2**-shift, and the result by 2**shift; return the node of the latter."""
    weight = product.inputs[1]
    result = product.outputs[0]
    assert weight is not None and weight.const_value is not None and result.name is not None
    constant = weight.const_value  # graphs may share it, and differ
    name = f"{weight.name}{SCALED}{shift}"
    factor = ir.tensor(np.float32(2.0**shift), name=f"{result.name}.factor")
    scaled = make_lazy_tensor(
        lambda: np.ldexp(constant.numpy(), -shift), constant.shape.numpy(), np.dtype(np.float32), name
    )
    scaled_weight = add_initializer(graph, name, scaled)
    replace(ParameterRef.read(weight), shift=shift).write(scaled_weight)
    product.replace_input_with(1, scaled_weight)
    multiply = ir.node(
        "Mul", [result, add_initializer(graph, f"{result.name}.factor", factor)], name=f"{product.name}_times"
    )
    full = multiply.outputs[0]
    full.type = ir.TensorType(FLOAT)
    full.shape = result.shape
    ir.convenience.replace_all_uses_with(result, full, replace_graph_outputs=True)
    multiply.replace_input_with(0, result)
    full.name = result.name
    result.name = f"{result.name}.scaled"
    graph.insert_after(product, multiply)
    multiply.metadata_props.update(product.metadata_props)
    del multiply.metadata_props[FP32]
    return multiply


def find_reader_of_codes(product: ir.Node) -> ir.Node | None:
    """Return the node that reads a product's weight of codes, which cannot be scaled; None without one."""
    if product.op_type == "MatMulNBits":
        return product
    weight = product.inputs[1] if len(product.inputs) > 1 else None
    producer = None if weight is None else weight.producer()
    return producer if producer is not None and producer.op_type == "DequantizeLinear" else None


def list_values(graph: ir.Graph) -> list[ir.Value]:
    computed = [output for node in graph for output in node.outputs]
    return [*graph.inputs, *graph.initializers.values(), *computed]


def make_cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [value], {"to": int(dtype)}, name=f"{value.name}_to_{NAMES[dtype]}")
    cast.outputs[0].name = f"{value.name}_{NAMES[dtype]}"
    cast.outputs[0].type = ir.TensorType(dtype)
    cast.outputs[0].shape = value.shape
    return cast


def convert_constant(value: ir.Value) -> ir.Value:
    """Return a constant in fp16; raise ValueError for values beyond fp16's range."""
    constant = value.const_value
    assert constant is not None and value.name is not None
    largest = find_magnitude(value)
    if not largest <= FP16_MAX:  # NaN is not <= either
        raise ValueError(f"{value.name} reaches {largest:g}, which fp16 (up to {FP16_MAX:g}) cannot hold")
    name = f"{value.name}{HALVED}"
    half = make_lazy_tensor(constant.numpy, constant.shape.numpy(), np.dtype(np.float16), name)
    converted = ir.Value(name=name, shape=value.shape, type=ir.TensorType(HALF), const_value=half)
    ParameterRef.read(value).write(converted)
    return converted


def retype_attributes(node: ir.Node, precision: ir.DataType) -> None:
    """Update the attribute by which Cast and similar operators name their result's type."""
    if node.op_type == "Cast" and node.attributes["to"].as_int() == FLOAT:
        node.attributes["to"] = ir.AttrInt64("to", int(precision))
    if node.op_type == "ConstantOfShape" and node.outputs[0].dtype == precision == HALF:
        value = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1)
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(value.astype(np.float16)))
    if node.op_type in ("RandomNormal", "EyeLike"):
        raise ValueError(f"the fp16 pass has no rule for {node.op_type} ({node.name}) yet")


def cast_output(graph: ir.Graph, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Cast a graph output at the very end; the new value takes over the output's name."""
    name = value.name
    value.name = f"{value.name}_{NAMES[HALF if dtype == FLOAT else FLOAT]}"
    cast = make_cast(value, dtype)
    cast.outputs[0].name = name
    graph.append(cast)
    return cast.outputs[0]
