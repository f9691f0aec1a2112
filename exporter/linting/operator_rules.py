"""Rules about operators: whether a target has them, in the version and the form that a graph uses."""

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
    dims_of,
    find_input,
    has_input,
    is_constant,
    is_standard,
    list_subgraphs,
    load_schema,
    name_type,
    opset_of,
    read_attribute,
    read_constant,
    type_of,
)
from .rule import Hit, Severity, accept_all, accept_cpu, make_rule

REDUCTIONS = "https://github.com/onnx/onnx-tensorrt/blob/8.6-GA/builtin_op_importers.cpp"
PLUGIN = "_TRT"  # what the names of NVIDIA's plugins end with
PLUGINS = "https://github.com/NVIDIA/TensorRT/tree/main/plugin"
LAST_IR = 13  # of ONNX Runtime 1.31


@make_rule(
    "an operator that no version has, or a later one",
    fix=tables.OTHERWISE,
    source=OPERATORS.format("main"),
)
def check_operator_unsupported(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        if node.op_type.endswith(PLUGIN):
            what = f"{node.op_type} is a plugin of TensorRT's"
            severity: Severity = "warning" if target.engine == "tensorrt" else "error"
            fix = "load NVIDIA's plugin library before parsing"
            yield Hit(what, node, severity=severity, fix=fix, source=PLUGINS)
        elif is_standard(node) and node.op_identifier() not in model.model.functions:
            first, source = tables.find_first_version(node.op_type, target)
            if first is None:
                what = f"{target.about} has no operator {node.op_type}"
            elif first > target.version and target.engine == "tensorrt":
                what = f"{node.op_type} came with TensorRT {first[0]}.{first[1]}"
            else:
                continue
            yield Hit(what, node, fix=tables.INSTEAD.get(node.op_type, ""), source=source)


@make_rule(
    "an operator of another domain: without a plugin, or taken for ONNX's own of that name",
    fix=tables.OTHERWISE,
    source="https://github.com/onnx/onnx-tensorrt/blob/10.1-GA/ModelImporter.cpp",
)
def check_operator_foreign(model: LintModel, target: Target) -> Iterator[Hit]:
    known = tables.RTX_CONTRIB if target.engine == "tensorrt-rtx" else ()
    for node in model.nodes:
        if is_standard(node) or node.op_type.endswith(PLUGIN):
            continue
        if node.domain == "com.microsoft" and node.op_type in known:
            continue
        name = f"{node.domain}.{node.op_type}"
        builtin = tables.find_first_version(node.op_type, target)[0]
        if builtin is not None and builtin <= target.version:
            what = f"the parser looks at names only: {name} is read as ONNX's own {node.op_type}"
            yield Hit(what, node, severity="wrong", fix="rename the operator, or the function")
        elif node.op_identifier() not in model.model.functions:
            fix = tables.INSTEAD.get(node.op_type, "")
            yield Hit(f"{name} is not an operator of ONNX, and needs a plugin of that name", node, fix=fix)


@make_rule(
    "a function inside the model",
    fix="inline it: onnx.inliner.inline_local_functions",
    source=OPERATORS.format("9.0-GA").replace("operators", "Changelog"),
    holds=lambda target: target.older_than(9),
)
def check_function(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        if node.op_identifier() in model.model.functions:
            yield Hit("functions inside a model are read from TensorRT 9.0 on", node)


@make_rule(
    "an opset outside the documented ones; the parser doesn't refuse it, ONNX Runtime does",
    fix="export with an opset that is documented, or convert it: onnx.version_converter",
    severity="warning",
    source=OPSETS,
    holds=accept_all,
)
def check_opset(model: LintModel, target: Target) -> Iterator[Hit]:
    low, high = target.opsets
    used = opset_of(model.model.graph)
    version = model.model.ir_version
    if target.plans:
        if not low <= used <= high:
            yield Hit(f"opset {used}, and {low} to {high} are documented")
        return
    if used > high:
        yield Hit(f"opset {used}, and {target.about} reads {low} to {high}", severity="error")
    if version > LAST_IR:
        what = f"IR version {version}, and {target.about} reads those up to {LAST_IR}"
        fix = f"set the model's ir_version to {LAST_IR}, if it uses nothing of a later one"
        yield Hit(what, severity="error", fix=fix)


@make_rule(
    "an input or attribute that came with a later opset",
    fix="export with an older opset",
    severity="warning",
    source="https://github.com/onnx/onnx/blob/main/docs/Changelog.md",
)
def check_operator_newer(model: LintModel, target: Target) -> Iterator[Hit]:
    """Yield inputs and attributes that an operator got after the last opset that the parser knows."""
    last = target.opsets[1]
    source = REDUCTIONS if target.older_than(9) else ""
    for node in model.nodes:
        now = model.find_schema(node)
        then = None if now is None else load_schema(node.op_type, last)
        if now is None or then is None or now.since_version <= last:
            continue
        version = f"{node.op_type}-{now.since_version}"
        variadic = then.inputs and then.inputs[-1].option == then.inputs[-1].option.Variadic
        for index in range(len(then.inputs), 0 if variadic else len(now.inputs)):
            if has_input(node, index):
                name = now.inputs[index].name
                what = f"input {name} came with {version}: a parser of opset {last} passes over it"
                yield Hit(what, node, severity="wrong", source=source)
        for name in sorted(node.attributes.keys() - then.attributes.keys()):
            known = now.attributes.get(name)
            usual = known.default_value if known is not None else None
            if usual is None or read_attribute(node, name) != get_attribute_value(usual):
                what = f"attribute {name} came with {version}: a parser of opset {last} may pass over it"
                yield Hit(what, node)


@make_rule(
    "an attribute's value that the parser refuses",
    fix="leave the attribute out, or write what it does as operators",
)
def check_attribute_unsupported(model: LintModel, target: Target) -> Iterator[Hit]:
    for operator, name, allowed, source in tables.ATTRIBUTES:
        for node in model.find_nodes(operator):
            value = read_attribute(node, name)
            values = value if isinstance(value, list | tuple) else [value]
            if name in node.attributes and not (allowed and all(item in allowed for item in values)):
                only = f"only {allowed[0]!r}" if allowed else "none"
                yield Hit(f"{name} is {value!r}; the parser takes {only}", node, source=source)


@make_rule(
    "ScatterElements with a reduction",
    fix="load NVIDIA's plugin library before parsing, or rewrite it",
)
def check_scatter_reduction(model: LintModel, target: Target) -> Iterator[Hit]:
    what = "with a reduction it needs the ScatterElements plugin"
    for node in model.nodes:
        if node.op_type != "ScatterElements" or read_attribute(node, "reduction", "none") == "none":
            continue
        if target.engine == "tensorrt-rtx":
            yield Hit(f"{what}, which NVIDIA's package of TensorRT-RTX lacks", node)
        else:
            yield Hit(what, node, severity="warning", source=CHANGELOG)


@make_rule(
    "more outputs than the parser takes",
    fix="remove the outputs that nothing uses; compute the others with operators of their own",
)
def check_outputs_unsupported(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.find_nodes(*tables.OUTPUTS):
        most = tables.OUTPUTS[node.op_type]
        used = max((i for i, value in enumerate(node.outputs, 1) if value.name), default=0)
        if used > most:
            yield Hit(f"has {used} outputs, and the parser takes {most}", node)


@make_rule(
    "an input that must be known when the plan is built",
    fix="make it an initializer, or fold the constants first",
)
def check_input_not_constant(model: LintModel, target: Target) -> Iterator[Hit]:
    for (operator, index), (name, until, source) in tables.CONSTANT_INPUTS.items():
        if until is not None and not target.older_than(*until):
            continue
        for node in model.find_nodes(operator):
            if has_input(node, index) and not is_constant(node.inputs[index]):
                what = f"its input {name} is computed while running, and must be known when the plan is built"
                yield Hit(what, node, source=source)


@make_rule("TopK beyond what its kernel holds", fix="take fewer")
def check_topk_limit(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        wanted = read_constant(find_input(node, 1)) if node.op_type == "TopK" else None
        if wanted is not None and wanted.size == 1 and wanted.item() > tables.TOPK_LIMIT:
            yield Hit(f"K is {wanted.item()}, and the most is {tables.TOPK_LIMIT}", node)


@make_rule(
    "an element type that an operator doesn't take",
    fix="Cast to a float before it, and back after it",
)
def check_operand_type(model: LintModel, target: Target) -> Iterator[Hit]:
    more = tables.RTX_OPERAND_TYPES if target.engine == "tensorrt-rtx" else {}
    refusals = {**tables.OPERAND_TYPES, **more}
    for node in model.find_nodes(*refusals):
        operands = 1 if node.op_type.startswith("Reduce") else 2  # the second input of a Reduce is axes
        for dtype in map(type_of, node.inputs[:operands]):
            if dtype is not None and name_type(dtype) in refusals[node.op_type]:
                yield Hit(f"takes no {name_type(dtype)}", node)
                break


@make_rule("Mod of floats without fmod", fix="set its attribute fmod to 1, as ONNX demands")
def check_mod_of_floats(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.find_nodes("Mod"):
        dtype = type_of(find_input(node, 0))
        if dtype is not None and dtype.is_floating_point() and not read_attribute(node, "fmod", 0):
            yield Hit(f"the remainder of {name_type(dtype)} needs fmod=1", node)


@make_rule("Dropout in training mode", fix="export the model in eval mode")
def check_training(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        mode = find_input(node, 2) if node.op_type == "Dropout" else None
        if mode is not None and (not is_constant(mode) or np.any(read_constant(mode))):
            yield Hit("drops numbers at random: it is in training mode", node)


@make_rule(
    "branches of different rank; a loop whose state changes its shape",
    fix="give the branches one rank; unroll the loop, or carry a buffer of fixed size",
)
def check_control_flow(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        if node.op_type == "If" and not is_constant(find_input(node, 0)):
            for pair in zip(*(graph.outputs for graph in list_subgraphs(node)), strict=False):
                ranks = [str(len(shape)) for shape in map(dims_of, pair) if shape is not None]
                if len(set(ranks)) > 1:
                    told = " and ".join(ranks)
                    yield Hit(f"the outputs of its branches have {told} axes; they must have as many", node)
        if node.op_type == "Loop":
            yield from check_loop_state(node)


def check_loop_state(node: ir.Node) -> Iterator[Hit]:
    """Yield values that a loop hands to its next iteration with another shape."""
    for body in list_subgraphs(node):
        for index, (inside, after) in enumerate(zip(body.inputs[2:], body.outputs[1:], strict=False), 2):
            before = dims_of(find_input(node, index))
            behind = dims_of(after)
            if before is None or behind is None or before == behind:
                continue
            pairs = zip(before, behind, strict=False)
            known = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
            if known or len(before) != len(behind) or grows(inside, after):
                yield Hit(f"{inside.name!r} changes its shape from round to round", node)


def grows(inside: ir.Value, after: ir.Value) -> bool:
    """Tell whether a loop appends to a value in each iteration."""
    node = after.producer()
    return node is not None and node.op_type == "Concat" and inside in node.inputs


@make_rule(
    "an output whose shape depends on numbers",
    fix="use a mask of fixed shape",
    severity="warning",
    source="https://docs.pytorch.org/TensorRT/contributors/cuda_graphs.html",
    holds=lambda target: target.engine == "tensorrt",
)
def check_data_dependent_shape(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.find_nodes(*tables.DATA_DEPENDENT):
        yield Hit("the shape of its output depends on numbers, so no CUDA graph can hold it", node)


@make_rule(
    "an attribute that ONNX Runtime doesn't know",
    fix="write it as a mask",
    source=ORT_MEASURED,
    holds=accept_cpu,
)
def check_attribute_unknown(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.find_nodes("Attention"):
        for name in tables.WINDOWS:
            if name in node.attributes:
                yield Hit(f"ONNX Runtime knows no attribute {name} of Attention", node)
