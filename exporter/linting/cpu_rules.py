"""Rules about ONNX Runtime's kernels on a CPU. The kernels are those of the installed version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import onnx.defs
import onnx_ir as ir

from ..targets import ORT_MEASURED, Target
from .model import LintModel, is_standard, schema_of, type_name, type_of
from .rule import Hit, for_cpu, rule

PROVIDER = "CPUExecutionProvider"
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
        if kernel.provider == PROVIDER:
            entry = (tuple(kernel.version_range), dict(kernel.type_constraints))
            found.setdefault((kernel.domain, kernel.op_name), []).append(entry)
    return found


@rule(
    "kernel-missing",
    "an operator without a kernel on a CPU, or without one for its types",
    fix="Cast to float before it, or write it as other operators",
    source=ORT_MEASURED,
    holds=for_cpu,
)
def kernel_missing(model: LintModel, target: Target) -> Iterator[Hit]:
    known = list_kernels()
    if known is None:
        what = "kernels were not checked: onnxruntime is not installed"
        yield Hit(what, severity="warning", fix="pip install 'planforge[cpu]'")
        return
    for node in model.nodes:
        if node.op_identifier() not in model.model.functions:
            domain = "" if is_standard(node) else node.domain
            what = find_problem(node, domain, model.opsets[node], known)
            if what:
                yield Hit(what, node)


def find_problem(node: ir.Node, domain: str, opset: int, known: Kernels) -> str:
    """Return why a node doesn't run; "" if it does, or if nothing is known of it."""
    here = known.get((domain, node.op_type), [])
    schema = schema_of(node.op_type, opset) if not domain else None
    if schema is None:
        name = f"{domain}.{node.op_type}" if domain else node.op_type
        return "" if here else f"ONNX Runtime has no operator {name} on a CPU"
    # The last kernel of an operator also serves versions that changed nothing but types.
    fitting = [types for (first, last), types in here if first <= schema.since_version <= last]
    given = types_of(node, schema)
    if any(all(accepts(types[name], dtype) for name, dtype in given if name in types) for types in fitting):
        return ""
    if is_function(schema) or node.op_type == "Constant":
        return ""  # computed with other operators, or when the graph is loaded
    told = " and ".join(dict.fromkeys(type_name(dtype) for _, dtype in given))
    return f"ONNX Runtime has no kernel of {node.op_type}-{schema.since_version} on a CPU for {told}"


def is_function(schema: Any) -> bool:
    """Tell whether ONNX says how to compute an operator with others."""
    return bool(schema.has_function or schema.has_context_dependent_function)


def types_of(node: ir.Node, schema: onnx.defs.OpSchema) -> list[tuple[str, ir.DataType]]:
    """Return the known element types of a node's inputs and outputs, by ONNX's type parameters."""
    given = []
    for values, formals in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for index, value in enumerate(values if formals else ()):
            dtype = type_of(value)
            if dtype is not None and isinstance(value, ir.Value) and isinstance(value.type, ir.TensorType):
                given.append((formals[min(index, len(formals) - 1)].type_str, dtype))
    return given


def accepts(types: list[str], dtype: ir.DataType) -> bool:
    """Tell whether a kernel takes a type, or ONNX Runtime casts to one that it takes."""
    by_cast = dtype == ir.DataType.FLOAT16 and "tensor(float)" in types
    return f"tensor({type_name(dtype)})" in types or by_cast


@rule(
    "node-names",
    "two nodes of one name",
    fix="give each node a name of its own, or none",
    source=ORT_MEASURED,
    holds=for_cpu,
)
def node_names(model: LintModel, target: Target) -> Iterator[Hit]:
    seen: set[tuple[object, str]] = set()
    for node in model.nodes:
        place = (id(node.graph), node.name or "")
        if node.name and place in seen:
            yield Hit(f"another node is called {node.name!r} too", node)
        seen.add(place)


@rule(
    "fp16-on-cpu",
    "fp16, for which x86 has no kernels",
    fix="run the fp32 or int8 graph on a CPU",
    severity="warning",
    source=ORT_MEASURED,
    holds=lambda target: "fp16" in target.without,
)
def fp16_on_cpu(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        first = node.inputs[0] if node.inputs else None
        if node.op_type in SLOW_IN_HALF and type_of(first) == ir.DataType.FLOAT16:
            yield Hit("is computed in float between two Casts: slower than fp32", node)


RULES = (kernel_missing, node_names, fp16_on_cpu)
