"""Which nodes of a session on a GPU run there, and which ONNX Runtime left on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BackendUnavailableError
from .captured_step import CapturedGraphs
from .cuda_kernels import INTEGERS, KERNELS, explain_missing
from .graph_file import FileNode, find_module, name_operator, read_nodes

MOST = 3  # nodes that a message names
COUNTS = frozenset({*INTEGERS, "bool"})  # the types of shapes, and of what is asked of them
MEASURES = ("Shape", "Size")  # operators that give whole numbers, whatever they read


class OtherNode(NamedTuple):
    """A node on the CPU that computes more than shapes, and its module in PyTorch, "" where none is known."""

    operator: str
    name: str
    module: str

    def __str__(self) -> str:
        """Return it in words: "GroupQueryAttention 'node_1' of h.0.attn"."""
        words = f"{self.operator} {self.name!r}" if self.name else f"{self.operator} without a name"
        return f"{words} of {self.module}" if self.module else words


@dataclass(frozen=True)
class Placement:
    """The nodes of an opened graph by where they run, after the engine's own fusions.

    Attributes:
        gpu: how many run on the GPU.
        shapes: how many compute shapes, on the CPU.
        others: those on the CPU that compute more.
        graphs: the CUDA graphs that were captured of it until now.
    """

    gpu: int
    shapes: int
    others: tuple[OtherNode, ...]
    graphs: CapturedGraphs

    def __str__(self) -> str:
        """Return the counts in words: "219 nodes on the GPU, 3 of shapes on the CPU"."""
        words = f"{self.gpu} nodes on the GPU, {self.shapes} of shapes on the CPU"
        if self.others:
            words += f", {len(self.others)} others on the CPU"
        if self.graphs.count:
            size = self.graphs.byte_count / 1e6
            plural = "s" if self.graphs.count > 1 else ""
            words += f"; {self.graphs.count} CUDA graph{plural} captured, {size:.1f} MB"
        return words

    def to_json(self) -> dict[str, int]:
        """Return the counts."""
        return {
            "gpu": self.gpu,
            "cpu_shapes": self.shapes,
            "cpu_others": len(self.others),
            "captured": self.graphs.count,
            "captured_bytes": self.graphs.byte_count,
        }

    def refuse_others(self, path: Path) -> None:
        """Refuse a graph of which nodes that compute more than shapes run on the CPU, and name them."""
        if not self.others:
            return
        counts = Counter(node.operator for node in self.others)
        told = ", ".join(f"{count} x {operator}" for operator, count in counts.most_common(MOST))
        named = map(str, self.others[:MOST])
        more = f" and {len(self.others) - MOST} more" if len(self.others) > MOST else ""
        raise BackendUnavailableError(
            f"ONNX Runtime would run some nodes of {path.name} on the CPU, at each step: {told}"
            f" ({'; '.join(named)}{more}); export it with --target cuda, or load it with cpu_nodes=True"
        )


def read_placement(session: Any, provider: str, graphs: CapturedGraphs, path: Path) -> Placement | None:
    """Return where the nodes of a session of a file run; None before ONNX Runtime 1.24, which tells not."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    gpu = 0
    on_cpu: list[Any] = []
    for part in session.get_provider_graph_assignment_info():
        nodes = part.get_nodes()
        if part.ep_name == provider:
            gpu += len(nodes)
        else:
            on_cpu += nodes
    known = read_nodes(path.read_bytes()) if on_cpu else {}
    others = tuple(
        OtherNode(node.op_type, node.name, find_module(node.name, known))
        for node in on_cpu
        if not computes_shape(name_operator(node.op_type, node.domain), known.get(node.name, ()))
    )
    return Placement(gpu, len(on_cpu) - len(others), others, graphs)


def computes_shape(operator: str, named: Sequence[FileNode]) -> bool:
    """Tell whether a node that is on the CPU computes a shape, which a GPU has a kernel for too.

    Args:
        operator: the node's, with its domain unless that is ONNX's own.
        named: the file's nodes that have its name. Of several with its operator, each must compute a shape.
    """
    nodes = [node for node in named if node.operator == operator]
    return all(map(is_of_counts, nodes or [FileNode(operator, "", {}, {})]))


def is_of_counts(node: FileNode) -> bool:
    """Tell whether a node that a GPU has a kernel for is of whole numbers, in one axis at most.

    Where the file does not tell the types of results, those of inputs do. Where it tells none, as of a node
    that ONNX Runtime made, the operator decides: whether its kernels take whole numbers.
    """
    types, results = (
        {number: tensor.dtype for number, tensor in tensors.items()}
        for tensors in (node.inputs, node.results)
    )
    if explain_missing(node.operator, types, results=results):
        return False
    if results:
        return all(dtype in COUNTS and (axes is None or axes <= 1) for dtype, axes in node.results.values())
    if node.operator not in MEASURES and not COUNTS.issuperset(types.values()):
        return False
    taken = next(iter(KERNELS[node.operator].types.values()), ())
    return not COUNTS.isdisjoint(taken)
