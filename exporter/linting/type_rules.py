"""Rules about element types and quantization."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from onnx.defs import OpSchema

from ..targets import RTX_MEASURED, Target
from ..tensorrt_versions import OPERATORS
from .model import (
    LintModel,
    attribute,
    input_at,
    is_standard,
    node_graphs,
    output_at,
    read_constant,
    schema_of,
    type_name,
    type_of,
)
from .operator_tables import words
from .rule import Hit, everywhere, rule

TYPES = OPERATORS.format("main")
CHANGES = "https://github.com/onnx/onnx-tensorrt/blob/main/docs/Changelog.md"
ONE_TYPE = "https://github.com/onnx/onnx/blob/main/docs/Operators.md and " + RTX_MEASURED

# Element types that the parser has no word for.
NEVER = frozenset(
    ir.DataType[name]
    for name in words(
        "STRING COMPLEX64 COMPLEX128 INT16 UINT16 UINT32 UINT64 UINT4 FLOAT8E5M2 FLOAT8E4M3FNUZ"
        " FLOAT8E5M2FNUZ"
    )
)
# Those that came later.
SINCE = {
    ir.DataType.BFLOAT16: (9, 0),
    ir.DataType.FLOAT8E4M3FN: (9, 0),
    ir.DataType.INT4: (10, 0),
    ir.DataType.FLOAT4E2M1: (10, 8),
}
QUANTIZED = frozenset({ir.DataType.INT8, ir.DataType.INT4, ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT4E2M1})
READS_UINT8 = frozenset({"Cast", "CastLike", "Equal", "Identity", "QuantizeLinear", "DequantizeLinear"})
UINT8 = ir.DataType.UINT8
# What the parser takes though ONNX forbids it. It takes bfloat16 wherever it takes float16.
TOLERATED = (("Erf", ir.DataType.INT8), ("ReduceSum", ir.DataType.INT8), ("TensorScatter", ir.DataType.INT32))


def tensors(model: LintModel) -> Iterator[tuple[ir.Value, ir.Node | None]]:
    """Yield every value with the node that computes it."""
    for value in (*model.model.graph.inputs, *model.weights()):
        yield value, None
    for node in model.nodes:
        for value in node.outputs:
            yield value, node


@rule(
    "type-unsupported",
    "an element type that the engine has not",
    fix="Cast to a type that it has, before export",
    source=TYPES,
)
def type_unsupported(model: LintModel, target: Target) -> Iterator[Hit]:
    for value, node in tensors(model):
        dtype = type_of(value)
        if dtype is None:
            continue
        first = SINCE.get(dtype, (0, 0))
        if dtype in NEVER:
            what = f"{type_name(dtype)} is no type of {target.about}"
        elif target.older_than(*first):
            what = f"{type_name(dtype)} came with TensorRT {first[0]}.{first[1]}"
        else:
            continue
        yield Hit(what, node, "" if node else str(value.name))


@rule(
    "double",
    "double, which is computed as float",
    fix="export in float, or check that its precision suffices",
    severity="warning",
    source=TYPES,
    alike=True,
)
def double(model: LintModel, target: Target) -> Iterator[Hit]:
    for value, node in tensors(model):
        if type_of(value) == ir.DataType.DOUBLE and (node is None or node.op_type == "Cast"):
            yield Hit("double is computed as float", node, "" if node else str(value.name))


@rule(
    "int64-input",
    "int64 inputs before TensorRT 9",
    fix="feed int32 there; ids and positions fit",
    severity="warning",
    source=CHANGES,
    holds=lambda target: target.older_than(9),
)
def int64_input(model: LintModel, target: Target) -> Iterator[Hit]:
    for value in model.model.graph.inputs:
        if type_of(value) == ir.DataType.INT64:
            what = "int64 becomes int32: a runtime must feed int32, and larger numbers are cut"
            yield Hit(what, tensor=str(value.name))


@rule(
    "uint8-inside",
    "uint8 anywhere but at the ends of a graph",
    fix="Cast it right behind the input, or compute in another type",
    source=TYPES,
    alike=True,
)
def uint8_inside(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        quantizes = node.op_type in ("QuantizeLinear", "Constant")
        for value in node.outputs:
            if type_of(value) == UINT8 and not quantizes and not value.is_graph_output():
                yield Hit("computes uint8 inside the graph", node)
        read = [v for v in node.inputs if type_of(v) == UINT8 and v is not None and v.is_graph_input()]
        if read and node.op_type not in READS_UINT8 and is_standard(node):
            yield Hit("reads a uint8 input without a Cast", node)


@rule(
    "quantized-constant",
    "a quantized weight that is read without DequantizeLinear",
    fix="put a DequantizeLinear right behind the weight",
    holds=lambda target: target.plans and not target.older_than(10),
    alike=True,
)
def quantized_constant(model: LintModel, target: Target) -> Iterator[Hit]:
    for value in model.weights():
        dtype = type_of(value)
        if dtype in QUANTIZED and dtype is not None:
            for node, _ in value.uses():
                if is_standard(node) and node.op_type not in ("DequantizeLinear", "QuantizeLinear"):
                    yield Hit(
                        f"reads a {type_name(dtype)} weight that no DequantizeLinear stands before", node
                    )


@rule(
    "quantization-form",
    "quantization that is not symmetric, to or from a type that is not int8, int4 or fp8",
    fix="quantize symmetrically to int8, with zero point 0 and positive scales",
    alike=True,
)
def quantization_form(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or not is_standard(node):
            continue
        data = type_of(input_at(node, 0))
        zero = input_at(node, 2)
        shifts = read_constant(zero)
        scale = read_constant(input_at(node, 1))
        if shifts is not None and np.any(np.asarray(shifts, np.float32)):
            yield Hit("its zero point is not 0: the parser takes symmetric quantization only", node)
        if scale is not None and not np.all(np.asarray(scale, np.float32) > 0):
            yield Hit(f"a scale is {np.asarray(scale, np.float32).min():g}; all must be above 0", node)
        foreign = node.op_type == "DequantizeLinear" and producer(node) != "QuantizeLinear"
        if foreign and data is not None and data in (UINT8, ir.DataType.INT32):
            yield Hit(f"dequantizes {type_name(data)}; the parser takes int8, int4 and fp8", node)
        if node.op_type == "QuantizeLinear" and type_of(output_at(node, 0)) == UINT8:
            # A zero point that is left out means uint8, by ONNX.
            if attribute(node, "output_dtype", 0):
                yield Hit("quantizes to uint8; the parser takes int8, int4 and fp8", node)
            else:
                what = "quantizes to uint8, which the parser reads as int8: what is above 127 is cut off"
                yield Hit(what, node, severity="wrong")


def producer(node: ir.Node) -> str:
    """Return the operator that computes a node's first input."""
    value = input_at(node, 0)
    found = None if value is None else value.producer()
    return "" if found is None else found.op_type


@rule(
    "fp8-hardware",
    "fp8 weights",
    fix="build for sm89 or newer, or quantize to int8",
    severity="warning",
    alike=True,
)
def fp8_hardware(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        if node.op_type == "DequantizeLinear" and type_of(input_at(node, 0)) == ir.DataType.FLOAT8E4M3FN:
            yield Hit("fp8 needs a GPU of sm89 or newer; a plan for an older one is not built", node)


def typed_inputs(model: LintModel, node: ir.Node) -> Iterator[tuple[OpSchema.FormalParameter, ir.DataType]]:
    """Yield the inputs whose types are known, with what ONNX says of them."""
    schema = schema_of(node.op_type, model.opsets[node]) if is_standard(node) else None
    for index, value in enumerate(node.inputs if schema is not None and schema.inputs else ()):
        assert schema is not None
        dtype = type_of(value)
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        is_tensor = value is not None and isinstance(value.type, ir.TensorType)
        if dtype is not None and is_tensor:
            yield formal, dtype


@rule(
    "type-invalid",
    "an element type that ONNX forbids there",
    fix="Cast to a type that the operator takes",
    source="https://github.com/onnx/onnx/blob/main/docs/Operators.md",
    holds=everywhere,
    alike=True,
)
def type_invalid(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        for formal, dtype in typed_inputs(model, node):
            as_half = dtype == ir.DataType.BFLOAT16 and "tensor(float16)" in formal.types
            tolerated = as_half or (node.op_type, dtype) in TOLERATED
            if f"tensor({type_name(dtype)})" not in formal.types and not (target.plans and tolerated):
                yield Hit(f"its input {formal.name} is {type_name(dtype)}, which ONNX forbids", node)
                break


@rule(
    "mixed-types",
    "an operator whose inputs must have one type, and have two",
    fix="write the Cast into the graph; of a norm cast scale and bias too",
    source=ONE_TYPE,
    holds=lambda target: target.typed,
    alike=True,
)
def mixed_types(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        if target.plans and node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue  # the parser casts their scales
        found: dict[str, dict[str, str]] = {}
        for formal, dtype in typed_inputs(model, node):
            if formal.is_homogeneous and not formal.type_str.startswith("tensor("):
                found.setdefault(formal.type_str, {}).setdefault(type_name(dtype), formal.name)
        for types in found.values():
            if len(types) > 1:
                told = " and ".join(f"{name} {dtype}" for dtype, name in types.items())
                yield Hit(f"its inputs must have one type: {told}", node)
                break
        if node.op_type == "If":
            yield from mixed_branches(node)


def mixed_branches(node: ir.Node) -> Iterator[Hit]:
    for pair in zip(*(graph.outputs for graph in node_graphs(node)), strict=False):
        types = [type_name(dtype) for dtype in map(type_of, pair) if dtype is not None]
        if len(set(types)) > 1:
            yield Hit(f"its branches give {' and '.join(types)}; they must give one type", node)


RULES = (
    type_unsupported,
    double,
    int64_input,
    uint8_inside,
    quantized_constant,
    quantization_form,
    fp8_hardware,
    type_invalid,
    mixed_types,
)
