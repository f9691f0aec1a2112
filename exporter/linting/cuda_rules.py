"""Rules about ONNX Runtime's kernels on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ...runtime.backends.cuda_kernels import DOCUMENTED, KERNELS, MEASURED, explain_missing
from ..host_inputs import ON_GPU, ON_HOST, find_late_inputs, place_nodes
from ..targets import Target
from .model import LintModel, is_standard, name_type, type_of
from .report import CUDA
from .rule import Hit, make_rule

NUMPY_NAMES = {"float": "float32", "double": "float64"}


def accept_cuda(target: Target) -> bool:
    return target.name == CUDA


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
    "a node without a kernel on a GPU, by its operator, its types or its attributes",
    fix="export with --target cuda, which takes graphs that have kernels; in fp16, w8a16 or w4a16",
    severity="warning",
    source=DOCUMENTED,
    holds=accept_cuda,
)
def check_computed_on_cpu(model: LintModel, target: Target) -> Iterator[Hit]:
    for node, operator, missing in list_without_kernel(model):
        words = f"{missing}: it is computed on the CPU, at each step"
        kernel = KERNELS.get(operator)
        yield Hit(words, node, source=kernel.source if kernel else "")


def list_without_kernel(model: LintModel) -> Iterator[tuple[ir.Node, str, str]]:
    """Yield the nodes that no kernel on a GPU takes, with their operator, and the reason in words.

    A function inside the model needs none: ONNX Runtime runs the nodes that it holds.
    """
    for node in model.nodes:
        if node.op_identifier() in model.model.functions:
            continue
        operator = node.op_type if is_standard(node) else f"{node.domain}.{node.op_type}"
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        types = name_types(node.inputs)
        results = name_types(node.outputs)
        if missing := explain_missing(operator, types, attributes, results):
            yield node, operator, missing


@dataclass(frozen=True)
class Placement:
    """Counts how many nodes of a graph run where.

    Attributes:
        gpu: on the GPU.
        cpu_shapes: on the CPU, which computes shapes.
        cpu_others: on the CPU, as no kernel on the GPU takes them.
        constants: nowhere later: they are computed when the graph is loaded.
    """

    gpu: int
    cpu_shapes: int
    cpu_others: int
    constants: int

    def describe(self) -> str:
        """Return the counts in words, as in "62 nodes run on the GPU, 6 shape computations on the CPU"."""
        more = f", {self.cpu_others} others on the CPU" if self.cpu_others else ""
        more += f", {self.constants} when it is loaded" if self.constants else ""
        return f"{self.gpu} nodes run on the GPU, {self.cpu_shapes} shape computations on the CPU{more}"


def count_placement(model: LintModel) -> Placement:
    """Count where ONNX Runtime with CUDA runs the nodes of a graph and of its branches."""
    without = {node for node, _, _ in list_without_kernel(model)}
    graph = model.model.graph
    placed = [pair for one in (graph, *graph.subgraphs()) for pair in place_nodes(one)]
    on_gpu = [node for node, place in placed if place == ON_GPU]
    shapes = sum(place == ON_HOST for _, place in placed)
    others = sum(node in without for node in on_gpu)
    return Placement(len(on_gpu) - others, shapes, others, len(placed) - len(on_gpu) - shapes)


def name_types(values: Sequence[ir.Value | None]) -> dict[int, str]:
    """Return the types of tensors that are known, by their numbers; those of sequences are not."""
    found = {}
    for number, value in enumerate(values):
        dtype = type_of(value)
        if value is not None and dtype is not None and isinstance(value.type, ir.TensorType):
            name = name_type(dtype)
            found[number] = NUMPY_NAMES.get(name, name)
    return found
