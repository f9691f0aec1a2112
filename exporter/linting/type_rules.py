"""Rules about element types and quantization."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ...runtime.backends.architectures import describe_sm
from ..number_formats import INT4, NVFP4
from ..passes.quantization_form import FIX, find_form_faults
from ..passes.quantization_form import OPERATORS as QUANTIZATION
from ..targets import RTX_MEASURED, Target
from ..tensorrt.hardware import BFLOAT16, FP4, FP8, FP32_PRODUCT, NEEDS, find_need
from ..tensorrt_versions import OPERATORS, find_first_version
from .model import (
    LintModel,
    find_input,
    find_output,
    is_standard,
    list_subgraphs,
    name_type,
    read_attribute,
    read_constant,
    type_of,
)
from .operator_tables import split_words
from .rule import Hit, accept_all, make_rule

TYPES = OPERATORS.format("main")
ONE_TYPE = "https://github.com/onnx/onnx/blob/main/docs/Operators.md and " + RTX_MEASURED

# Element types that the parser has no word for.
NEVER = frozenset(
    ir.DataType[name]
    for name in split_words(
        "STRING COMPLEX64 COMPLEX128 INT16 UINT16 UINT32 UINT64 UINT4 FLOAT8E5M2 FLOAT8E4M3FNUZ"
        " FLOAT8E5M2FNUZ"
    )
)
# Those that came later; of 4 bits with the opsets that ONNX has them in.
SINCE = {
    ir.DataType.BFLOAT16: (9, 0),
    ir.DataType.FLOAT8E4M3FN: (9, 0),
    **{ir.DataType(f.element_type): find_first_version(f.opset) for f in (INT4, NVFP4)},
}
QUANTIZED = frozenset({ir.DataType.INT8, ir.DataType.INT4, ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT4E2M1})
READS_UINT8 = frozenset({"Cast", "CastLike", "Equal", "Identity", "QuantizeLinear", "DequantizeLinear"})
UINT8 = ir.DataType.UINT8
# What the parser takes though ONNX forbids it. It takes bfloat16 wherever it takes float16.
TOLERATED = (("Erf", ir.DataType.INT8), ("ReduceSum", ir.DataType.INT8), ("TensorScatter", ir.DataType.INT32))


def list_tensors(model: LintModel) -> Iterator[tuple[ir.Value, ir.Node | None]]:
    """Yield every value with the node that computes it."""
    for value in (*model.model.graph.inputs, *model.list_weights()):
        yield value, None
    for node in model.nodes:
        for value in node.outputs:
            yield value, node


@make_rule(
    "an element type that the engine has not",
    fix="Cast to a type that it has, before export",
    source=TYPES,
)
def check_type_unsupported(model: LintModel, target: Target) -> Iterator[Hit]:
    for value, node in list_tensors(model):
        dtype = type_of(value)
        if dtype is None:
            continue
        first = SINCE.get(dtype, (0, 0))
        if dtype in NEVER:
            what = f"{name_type(dtype)} is not a type of {target.about}"
        elif target.older_than(*first):
            what = f"{name_type(dtype)} is documented from TensorRT {first[0]}.{first[1]} on"
        else:
            continue
        yield Hit(what, node, "" if node else str(value.name))


@make_rule(
    "double, which is computed as float",
    fix="export in float, or check that its precision suffices",
    severity="warning",
    source=TYPES,
    alike=True,
)
def check_double(model: LintModel, target: Target) -> Iterator[Hit]:
    for value, node in list_tensors(model):
        if type_of(value) == ir.DataType.DOUBLE and (node is None or node.op_type == "Cast"):
            yield Hit("double is computed as float", node, "" if node else str(value.name))


@make_rule(
    "int64 inputs before TensorRT 9",
    fix="feed int32 there; ids and positions fit",
    severity="warning",
    source="https://github.com/onnx/onnx-tensorrt/blob/main/docs/Changelog.md",
    holds=lambda target: target.older_than(9),
)
def check_int64_input(model: LintModel, target: Target) -> Iterator[Hit]:
    for value in model.model.graph.inputs:
        if type_of(value) == ir.DataType.INT64:
            what = "int64 becomes int32: a runtime must feed int32, and larger numbers are cut"
            yield Hit(what, tensor=str(value.name))


@make_rule(
    "uint8 anywhere but at the ends of a graph",
    fix="Cast it right behind the input, or compute in another type",
    source=TYPES,
    alike=True,
)
def check_uint8_inside(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        quantizes = node.op_type in ("QuantizeLinear", "Constant")
        for value in node.outputs:
            if type_of(value) == UINT8 and not quantizes and not value.is_graph_output():
                yield Hit("computes uint8 inside the graph", node)
        read = [v for v in node.inputs if type_of(v) == UINT8 and v is not None and v.is_graph_input()]
        if read and node.op_type not in READS_UINT8 and is_standard(node):
            yield Hit("reads a uint8 input without a Cast", node)


@make_rule(
    "a quantized weight that is read without DequantizeLinear",
    fix="put a DequantizeLinear right behind the weight",
    holds=lambda target: target.plans and not target.older_than(10),
    alike=True,
)
def check_quantized_constant(model: LintModel, target: Target) -> Iterator[Hit]:
    for value in model.list_weights():
        dtype = type_of(value)
        if dtype is None or dtype not in QUANTIZED:
            continue
        for node, _ in value.uses():
            if is_standard(node) and node.op_type not in ("DequantizeLinear", "QuantizeLinear"):
                what = f"reads a {name_type(dtype)} weight that no DequantizeLinear stands before"
                yield Hit(what, node)


@make_rule(
    "quantization that is not symmetric, or of a type that is not int8, int4, fp8 or fp4",
    fix=f"{FIX}; to int8, int4, fp8 or fp4",
    alike=True,
)
def check_quantization_form(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.find_nodes(*QUANTIZATION):
        data = find_input(node, 0)
        dtype = type_of(data)
        for fault in find_form_faults(node, read_constant):
            yield Hit(fault, node)
        before = None if data is None else data.producer()
        foreign = node.op_type == "DequantizeLinear" and (
            before is None or before.op_type != "QuantizeLinear"
        )
        if foreign and dtype is not None and dtype in (UINT8, ir.DataType.INT32):
            yield Hit(f"dequantizes {name_type(dtype)}; the parser takes int8, int4, fp8 and fp4", node)
        if node.op_type == "QuantizeLinear" and type_of(find_output(node, 0)) == UINT8:
            # A zero point that is left out means uint8, by ONNX.
            if read_attribute(node, "output_dtype", 0):
                yield Hit("quantizes to uint8; the parser takes int8, int4, fp8 and fp4", node)
            else:
                what = "quantizes to uint8, which the parser reads as int8: what is above 127 is cut off"
                yield Hit(what, node, severity="wrong")


@make_rule(
    "fp8 or fp4 weights",
    fix="build for newer GPUs, or quantize to int8",
    severity="warning",
    alike=True,
)
def check_fp8_hardware(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.find_nodes("DequantizeLinear"):
        dtype = type_of(find_input(node, 0))
        need = None if dtype is None else NEEDS.get(int(dtype))
        if need in (FP8, FP4):
            yield Hit(f"{need.what} needs a GPU of {need.gpu} or newer; no plan is built for others", node)


@make_rule(
    "a product in fp32, or bfloat16, before sm80",
    fix="leave the older GPU out (--sm), or run it there with ONNX Runtime (--target cuda)",
    severity="warning",
    holds=lambda target: target.engine == "tensorrt-rtx",
)
def check_older_hardware(model: LintModel, target: Target) -> Iterator[Hit]:
    values = (value for node in model.nodes for value in node.outputs)
    if model.in_bundle and all(type_of(value) != ir.DataType.FLOAT16 for value in values):
        return  # plans are built from fp16
    for node in model.nodes:
        types = ([type_of(value) for value in values] for values in (node.inputs, node.outputs))
        need = find_need(node.op_type, *types) if is_standard(node) else None
        if need is not None and need in (FP32_PRODUCT, BFLOAT16):
            older = f"no plan is built for {describe_sm('sm75')}"
            yield Hit(f"{need.what} needs a GPU of {need.gpu} or newer; {older}", node)


@make_rule(
    "an element type that ONNX forbids there",
    fix="Cast to a type that the operator takes",
    source="https://github.com/onnx/onnx/blob/main/docs/Operators.md",
    holds=accept_all,
    alike=True,
)
def check_type_invalid(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        for formal, dtype in model.list_input_types(node):
            as_half = dtype == ir.DataType.BFLOAT16 and "tensor(float16)" in formal.types
            tolerated = as_half or (node.op_type, dtype) in TOLERATED
            if f"tensor({name_type(dtype)})" not in formal.types and not (target.plans and tolerated):
                yield Hit(f"its input {formal.name} is {name_type(dtype)}, which ONNX forbids", node)
                break


@make_rule(
    "an operator whose inputs must have one type, and have two",
    fix="write the Cast into the graph; of a norm cast scale and bias too",
    source=ONE_TYPE,
    holds=lambda target: not target.older_than(9),  # there a flag chooses the types
    alike=True,
)
def check_mixed_types(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        if target.plans and node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue  # the parser casts their scales
        found: dict[str, dict[str, str]] = {}
        for formal, dtype in model.list_input_types(node):
            if formal.is_homogeneous and not formal.type_str.startswith("tensor("):
                found.setdefault(formal.type_str, {}).setdefault(name_type(dtype), formal.name)
        for types in found.values():
            if len(types) > 1:
                told = " and ".join(f"{name} {dtype}" for dtype, name in types.items())
                yield Hit(f"its inputs must have one type: {told}", node)
                break
        if node.op_type == "If":
            yield from check_branches(node)


def check_branches(node: ir.Node) -> Iterator[Hit]:
    for pair in zip(*(graph.outputs for graph in list_subgraphs(node)), strict=False):
        types = [name_type(dtype) for dtype in map(type_of, pair) if dtype is not None]
        if len(set(types)) > 1:
            yield Hit(f"its branches give {' and '.join(types)}; they must give one type", node)
