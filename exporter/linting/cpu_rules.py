"""Rules about ONNX Runtime's kernels on a CPU. The kernels are those of the installed version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import onnx_ir as ir

from ..targets import ORT_MEASURED, Target
from .model import LintModel, find_input, is_standard, list_types, name_type, type_of
from .rule import Hit, accept_cpu, make_rule

SLOW_IN_HALF = frozenset({"Attention", "Gemm", "MatMul", "Softmax"})
Kernels = Mapping[tuple[str, str], list[tuple[tuple[int, int], dict[str, list[str]]]]]


@cache
def list_kernels() -> Kernels | None:
    """Return the versions and types of each kernel by domain and operator; None without onnxruntime."""
    try:
        from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def
    except ImportError:
        return None
    found: dict[tuple[str, str], list[Any]] = {}
    for kernel in get_all_opkernel_def():
        if kernel.provider == "CPUExecutionProvider":
            entry = (tuple(kernel.version_range), dict(kernel.type_constraints))
            found.setdefault((kernel.domain, kernel.op_name), []).append(entry)
    return found


@make_rule(
    "an operator without a kernel on a CPU, or without one for its types",
    fix="Cast to float before it, or write it as other operators",
    source=ORT_MEASURED,
    holds=accept_cpu,
)
def check_kernel_missing(model: LintModel, target: Target) -> Iterator[Hit]:
    known = list_kernels()
    if known is None:
        what = "kernels were not checked: onnxruntime is not installed"
        yield Hit(what, severity="warning", fix="pip install 'planforge[cpu]'")
        return
    for node in model.nodes:
        if node.op_identifier() not in model.model.functions:
            what = explain_missing_kernel(model, node, known)
            if what:
                yield Hit(what, node)


def explain_missing_kernel(model: LintModel, node: ir.Node, known: Kernels) -> str:
    """Return why a node does not run; "" if it does, or if nothing is known about it."""
    kernels = known.get((node.domain, node.op_type), [])
    schema: Any = model.find_schema(node)
    if schema is None:
        name = node.op_type if is_standard(node) else f"{node.domain}.{node.op_type}"
        return "" if kernels else f"ONNX Runtime has no operator {name} on a CPU"
    # The last kernel of an operator also serves versions that changed nothing but types.
    fitting = [types for (first, last), types in kernels if first <= schema.since_version <= last]
    typed = [*list_types(node.inputs, schema.inputs), *list_types(node.outputs, schema.outputs)]
    given = [(formal.type_str, dtype) for formal, dtype in typed]
    if any(all(accepts(types[name], dtype) for name, dtype in given if name in types) for types in fitting):
        return ""
    if schema.has_function or schema.has_context_dependent_function or node.op_type == "Constant":
        return ""  # computed with other operators, or when the graph is loaded
    told = " and ".join(dict.fromkeys(name_type(dtype) for _, dtype in given))
    return f"ONNX Runtime has no kernel of {node.op_type}-{schema.since_version} on a CPU for {told}"


def accepts(types: list[str], dtype: ir.DataType) -> bool:
    """Tell whether a kernel takes a type, or ONNX Runtime casts to one that it takes."""
    by_cast = dtype == ir.DataType.FLOAT16 and "tensor(float)" in types
    return f"tensor({name_type(dtype)})" in types or by_cast


@make_rule(
    "two nodes of one name",
    fix="give each node a name of its own, or none",
    source=ORT_MEASURED,
    holds=accept_cpu,
)
def check_node_names(model: LintModel, target: Target) -> Iterator[Hit]:
    seen: set[tuple[object, str]] = set()
    for node in model.nodes:
        place = (id(node.graph), node.name or "")
        if node.name and place in seen:
            yield Hit(f"another node is called {node.name!r} too", node)
        seen.add(place)


@make_rule(
    "fp16, for which x86 has no kernels",
    fix="run the fp32 or int8 graph on a CPU",
    severity="warning",
    source=ORT_MEASURED,
    holds=lambda target: "fp16" in target.without,
)
def check_fp16_on_cpu(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        if node.op_type in SLOW_IN_HALF and type_of(find_input(node, 0)) == ir.DataType.FLOAT16:
            yield Hit("is computed in float between two Casts: slower than fp32", node)
