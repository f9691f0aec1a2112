"""Rules about operators: whether they are there, in the version and the form that a graph uses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from onnx.helper import get_attribute_value

from ..targets import ORT_MEASURED, Target
from ..tensorrt_versions import CHANGELOG, OPERATORS, OPSETS
from . import operator_tables as tables
from .model import (
    LintModel,
    attribute,
    dims_of,
    has_input,
    input_at,
    is_constant,
    is_standard,
    node_graphs,
    read_constant,
    schema_of,
    type_name,
    type_of,
    used_outputs,
)
from .rule import Hit, Severity, everywhere, rule

IMPORTER = "https://github.com/onnx/onnx-tensorrt/blob/10.1-GA/ModelImporter.cpp"
REDUCTIONS = "https://github.com/onnx/onnx-tensorrt/blob/8.6-GA/builtin_op_importers.cpp"
PLUGIN = "_TRT"  # what the names of NVIDIA's plugins end with
PLUGINS = "https://github.com/NVIDIA/TensorRT/tree/main/plugin"
LAST_IR = 13  # of ONNX Runtime 1.31


@rule(
    "operator-unsupported",
    "an operator that no version has, or a later one",
    fix=tables.OTHERWISE,
    source=OPERATORS.format("main"),
)
def operator_unsupported(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        if node.op_type.endswith(PLUGIN):
            what = f"{node.op_type} is a plugin of TensorRT's"
            severity: Severity = "warning" if target.engine == "tensorrt" else "error"
            fix = "load NVIDIA's plugin library before parsing"
            yield Hit(what, node, severity=severity, fix=fix, source=PLUGINS)
        elif is_standard(node) and node.op_identifier() not in model.model.functions:
            first, source = tables.first_version(node.op_type, target)
            if first is None:
                what = f"{target.about} has no operator {node.op_type}"
            elif first > target.version and target.engine == "tensorrt":
                what = f"{node.op_type} came with TensorRT {first[0]}.{first[1]}"
            else:
                continue
            fix = tables.INSTEAD.get(node.op_type, "")
            yield Hit(what, node, fix=fix, source=source)


@rule(
    "operator-foreign",
    "an operator of another domain: without a plugin, or taken for ONNX's own of that name",
    fix=tables.OTHERWISE,
    source=IMPORTER,
)
def operator_foreign(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        if is_standard(node) or node.op_type.endswith(PLUGIN):
            continue
        name = f"{node.domain}.{node.op_type}"
        builtin = tables.first_version(node.op_type, target)[0]
        is_builtin = builtin is not None and builtin <= target.version
        rtx = target.engine == "tensorrt-rtx"
        if rtx and node.domain == "com.microsoft" and node.op_type in tables.RTX_CONTRIB:
            continue
        if is_builtin:
            what = f"the parser looks at names only: {name} is read as ONNX's own {node.op_type}"
            yield Hit(what, node, severity="wrong", fix="rename the operator, or the function")
        elif node.op_identifier() not in model.model.functions:
            fix = tables.INSTEAD.get(node.op_type, "")
            yield Hit(f"{name} is no operator of ONNX, and needs a plugin of that name", node, fix=fix)


@rule(
    "function",
    "a function inside the model",
    fix="inline it: onnx.inliner.inline_local_functions",
    source=OPERATORS.format("9.0-GA").replace("operators", "Changelog"),
    holds=lambda target: target.older_than(9),
)
def function(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        if node.op_identifier() in model.model.functions and target.older_than(9):
            yield Hit("functions inside a model are read from TensorRT 9.0 on", node)


@rule(
    "opset",
    "an opset outside the documented ones; the parser doesn't refuse it, ONNX Runtime does",
    fix="export with an opset that is documented, or convert it: onnx.version_converter",
    severity="warning",
    source=OPSETS,
    holds=everywhere,
)
def opset(model: LintModel, target: Target) -> Iterator[Hit]:
    low, high = target.opsets
    used = model.opset
    if not target.plans:
        if used > high:
            yield Hit(f"opset {used}, and {target.about} reads {low} to {high}", severity="error")
        version = model.model.ir_version
        if version > LAST_IR:
            what = f"IR version {version}, and {target.about} reads those up to {LAST_IR}"
            fix = f"set the model's ir_version to {LAST_IR}, if it uses nothing of a later one"
            yield Hit(what, severity="error", fix=fix)
    elif not low <= used <= high:
        yield Hit(f"opset {used}, and {low} to {high} are documented")


@rule(
    "operator-newer",
    "an input or attribute that came with a later opset",
    fix="export with an older opset",
    severity="warning",
    source="https://github.com/onnx/onnx/blob/main/docs/Changelog.md",
)
def operator_newer(model: LintModel, target: Target) -> Iterator[Hit]:
    """Yield inputs and attributes that an operator got after the last opset that the parser knows."""
    last = target.opsets[1]
    source = REDUCTIONS if target.older_than(9) else ""
    for node in model.nodes:
        now = schema_of(node.op_type, model.opsets[node]) if is_standard(node) else None
        then = schema_of(node.op_type, last) if now is not None else None
        if now is None or then is None or now.since_version <= last:
            continue
        version = f"{node.op_type}-{now.since_version}"
        variadic = then.inputs and then.inputs[-1].option == then.inputs[-1].option.Variadic
        for index in range(len(then.inputs), 0 if variadic else len(now.inputs)):
            if has_input(node, index):
                what = f"input {now.inputs[index].name} came with {version}"
                what += f": a parser of opset {last} passes over it"
                yield Hit(what, node, severity="wrong", source=source)
        for name in sorted(node.attributes.keys() - then.attributes.keys()):
            known = now.attributes.get(name)
            usual = known.default_value if known is not None else None
            if usual is None or attribute(node, name) != get_attribute_value(usual):
                yield Hit(
                    f"attribute {name} came with {version}: a parser of opset {last} may pass over it", node
                )


@rule(
    "attribute-unsupported",
    "an attribute's value that the parser refuses",
    fix="leave the attribute out, or write what it does as operators",
)
def attribute_unsupported(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        for operator, name, allowed, source in tables.ATTRIBUTES:
            if node.op_type == operator and is_standard(node) and name in node.attributes:
                value = attribute(node, name)
                values = value if isinstance(value, list | tuple) else [value]
                if not allowed or any(item not in allowed for item in values):
                    only = f"only {allowed[0]!r}" if allowed else "none"
                    yield Hit(f"{name} is {value!r}; the parser takes {only}", node, source=source)


@rule("mod-of-floats", "Mod of floats without fmod", fix="set its attribute fmod to 1, as ONNX demands")
def mod_of_floats(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        dtype = type_of(input_at(node, 0)) if node.op_type == "Mod" and is_standard(node) else None
        if dtype is not None and dtype.is_floating_point() and not attribute(node, "fmod", 0):
            yield Hit(f"the remainder of {type_name(dtype)} needs fmod=1", node)


@rule(
    "scatter-reduction",
    "ScatterElements with a reduction",
    fix="load NVIDIA's plugin library before parsing, or rewrite it",
)
def scatter_reduction(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        if node.op_type == "ScatterElements" and attribute(node, "reduction", "none") != "none":
            rtx = target.engine == "tensorrt-rtx"
            what = "with a reduction it needs the ScatterElements plugin"
            lacks = what + ", which NVIDIA's package of TensorRT-RTX lacks"
            yield Hit(lacks, node) if rtx else Hit(what, node, severity="warning", source=CHANGELOG)


@rule(
    "outputs-unsupported",
    "more outputs than the parser takes",
    fix="remove the outputs that nothing uses; compute the others with operators of their own",
)
def outputs_unsupported(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        most = tables.OUTPUTS.get(node.op_type) if is_standard(node) else None
        if most is not None and used_outputs(node) > most:
            yield Hit(f"has {used_outputs(node)} outputs, and the parser takes {most}", node)


@rule(
    "input-not-constant",
    "an input that must be known when the plan is built",
    fix="make it an initializer, or fold the constants first",
)
def input_not_constant(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes if target.plans else ():
        for index in range(1, len(node.inputs)):
            place = (node.op_type, index)
            name = tables.CONSTANT_INPUTS.get(place)
            source = ""
            if place in tables.CONSTANT_INPUTS_UNTIL:
                until = tables.CONSTANT_INPUTS_UNTIL[place]
                name, source = (until[0], until[2]) if target.older_than(*until[1]) else (None, "")
            if name and is_standard(node) and has_input(node, index) and not is_constant(node.inputs[index]):
                what = f"its input {name} is computed while running, and must be known when the plan is built"
                yield Hit(what, node, source=source)


@rule("topk-limit", "TopK beyond what its kernel holds", fix="take fewer")
def topk_limit(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        wanted = read_constant(input_at(node, 1)) if node.op_type == "TopK" else None
        if wanted is not None and wanted.size == 1 and wanted.reshape(-1)[0] > tables.TOPK_LIMIT:
            yield Hit(f"K is {wanted.reshape(-1)[0]}, and the most is {tables.TOPK_LIMIT}", node)


@rule(
    "operand-type",
    "an element type that an operator doesn't take",
    fix="Cast to a float before it, and back after it",
)
def operand_type(model: LintModel, target: Target) -> Iterator[Hit]:
    rtx = target.engine == "tensorrt-rtx"
    refusals = dict(tables.OPERAND_TYPES)
    if rtx:
        refusals.update(tables.RTX_OPERAND_TYPES)
    for node in model.nodes:
        refused = refusals.get(node.op_type, ()) if is_standard(node) else ()
        for value in node.inputs[:2] if refused else ():
            dtype = type_of(value)
            if dtype is not None and type_name(dtype) in refused and not is_axes(node, value):
                yield Hit(f"takes no {type_name(dtype)}", node)
                break


def is_axes(node: ir.Node, value: ir.Value | None) -> bool:
    return node.op_type.startswith("Reduce") and value is not node.inputs[0]


@rule("training", "Dropout in training mode", fix="export the model in eval mode")
def training(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        mode = input_at(node, 2) if node.op_type == "Dropout" else None
        if mode is not None and (not is_constant(mode) or np.any(read_constant(mode))):
            yield Hit("drops numbers at random: it is in training mode", node)


@rule(
    "control-flow",
    "branches of different rank; a loop whose state changes its shape",
    fix="give the branches one rank; unroll the loop, or carry a buffer of fixed size",
)
def control_flow(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        if node.op_type == "If" and not is_constant(input_at(node, 0)):
            for pair in zip(*(graph.outputs for graph in node_graphs(node)), strict=False):
                shapes = [dims_of(value) for value in pair]
                if None not in shapes and len({len(shape or ()) for shape in shapes}) > 1:
                    ranks = " and ".join(str(len(shape or ())) for shape in shapes)
                    yield Hit(f"the outputs of its branches have {ranks} axes; they must have as many", node)
        if node.op_type == "Loop":
            yield from check_loop_state(node)


def check_loop_state(node: ir.Node) -> Iterator[Hit]:
    """Yield what a loop hands to its next round in another shape."""
    for body in node_graphs(node):
        for inside, after in zip(body.inputs[2:], body.outputs[1:], strict=False):
            outside = input_at(node, body.inputs.index(inside))
            shapes = [dims_of(outside), dims_of(after)]
            if None in shapes or shapes[0] == shapes[1]:
                continue
            pairs = list(zip(shapes[0] or (), shapes[1] or (), strict=False))
            known = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
            if known or len(shapes[0] or ()) != len(shapes[1] or ()) or grows(inside, after):
                yield Hit(f"{inside.name!r} changes its shape from round to round", node)


def grows(inside: ir.Value, after: ir.Value) -> bool:
    """Tell whether a value is appended to in each round."""
    node = after.producer()
    return node is not None and node.op_type == "Concat" and inside in node.inputs


@rule(
    "data-dependent-shape",
    "an output whose shape depends on numbers",
    fix="use a mask of fixed shape",
    severity="warning",
    source="https://docs.pytorch.org/TensorRT/contributors/cuda_graphs.html",
    holds=lambda target: target.engine == "tensorrt",
)
def data_dependent_shape(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        if node.op_type in tables.DATA_DEPENDENT and is_standard(node):
            yield Hit("the shape of its output depends on numbers, so no CUDA graph can hold it", node)


@rule(
    "attribute-unknown",
    "an attribute that ONNX Runtime doesn't know",
    fix="write it as a mask",
    source=ORT_MEASURED,
    holds=lambda target: not target.plans,
)
def attribute_unknown(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        for operator, name, _ in tables.CPU_ATTRIBUTES:
            if node.op_type == operator and is_standard(node) and name in node.attributes:
                yield Hit(f"ONNX Runtime knows no attribute {name} of {operator}", node)


RULES = (
    operator_unsupported,
    operator_foreign,
    function,
    opset,
    operator_newer,
    attribute_unsupported,
    scatter_reduction,
    outputs_unsupported,
    input_not_constant,
    topk_limit,
    operand_type,
    mod_of_floats,
    training,
    control_flow,
    data_dependent_shape,
    attribute_unknown,
)
