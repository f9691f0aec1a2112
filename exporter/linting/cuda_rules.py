"""Rules about ONNX Runtime's kernels on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ..host_inputs import find_late_inputs
from ..targets import Target
from .model import LintModel, find_input, name_type, type_of
from .rule import Hit, make_rule

MEASURED = "measured with onnxruntime-gpu 1.31.1 on an H200"
CACHE = 3  # GroupQueryAttention's past keys
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def accept_cuda(target: Target) -> bool:
    return target.name == "cuda"


@make_rule(
    "what a node reads on the host, though the GPU computes it",
    fix="make it an input of the graph, or compute it from shapes alone",
    severity="wrong",
    source=MEASURED,
    holds=accept_cuda,
)
def check_host_input(model: LintModel, target: Target) -> Iterator[Hit]:
    for node, value in find_late_inputs(model.model.graph):
        yield Hit(f"reads {value.name!r} on the host before the GPU has computed it", node)


@make_rule(
    "GroupQueryAttention in a type without a kernel on a GPU",
    fix="export fp32 with --target cuda, which takes another dialect, or run fp16",
    severity="warning",
    source=MEASURED,
    holds=accept_cuda,
)
def check_attention_on_cpu(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        dtype = type_of(find_input(node, CACHE))
        if node.op_type == "GroupQueryAttention" and dtype is not None and dtype not in HALVES:
            yield Hit(f"its cache is {name_type(dtype)}: it is computed on the CPU, at each step", node)
