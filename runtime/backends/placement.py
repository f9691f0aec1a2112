"""Which nodes of a session on a GPU run there, and which ONNX Runtime left on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailableError
from .captured_step import CapturedGraphs
from .cuda_kernels import SHAPE_OPERATORS
from .protobuf import Span, find_fields

# Numbers of fields in an ONNX file's messages.
MODEL_GRAPH = 7
GRAPH_NODE = 1
NODE_INPUT = 1
NODE_NAME = 3
NODE_METADATA = 9
ENTRY_KEY = 1
ENTRY_VALUE = 2
MODULE = "planforge.module"  # a node's metadata: its module in PyTorch
WEIGHT = ".weight"  # what the name of a module's weight has behind its path
MOST = 3  # nodes that a message names


@dataclass(frozen=True)
class Placement:
    """The nodes of an opened graph by where they run, after the engine's own fusions.

    Attributes:
        gpu: how many run on the GPU.
        shapes: how many compute shapes, on the CPU.
        others: the operators and names of those on the CPU that compute more.
        graphs: the CUDA graphs that were captured of it until now.
    """

    gpu: int
    shapes: int
    others: tuple[tuple[str, str], ...]
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
        counts = Counter(operator for operator, _ in self.others)
        told = ", ".join(f"{count} x {operator}" for operator, count in counts.most_common(MOST))
        modules = dict(list_modules(path.read_bytes()))
        named = [name_node(operator, name, modules) for operator, name in self.others[:MOST]]
        more = f" and {len(self.others) - MOST} more" if len(self.others) > MOST else ""
        raise BackendUnavailableError(
            f"ONNX Runtime has no GPU kernel for some nodes of {path.name}, and would run them on the CPU:"
            f" {told} ({'; '.join(named)}{more}); export it with --target cuda, or load it with"
            " cpu_nodes=True"
        )


def read_placement(session: Any, provider: str, graphs: CapturedGraphs) -> Placement | None:
    """Return where a session's nodes run, and its graphs; None before ONNX Runtime 1.24, which tells not."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    gpu = 0
    on_cpu: list[tuple[str, str]] = []
    for part in session.get_provider_graph_assignment_info():
        nodes = part.get_nodes()
        if part.ep_name == provider:
            gpu += len(nodes)
        else:
            on_cpu += [(node.op_type, node.name) for node in nodes]
    others = tuple(node for node in on_cpu if node[0] not in SHAPE_OPERATORS)
    return Placement(gpu, len(on_cpu) - len(others), others, graphs)


def list_modules(model: bytes) -> Iterator[tuple[str, str]]:
    """Yield the names of an ONNX file's nodes, with the path of the PyTorch module that each belongs to.

    It is in a node's metadata, or in the name of the weight that it reads.
    """

    def read(span: Span, field: int) -> list[str]:
        return [model[at.start : at.end].decode() for at in find_fields(model, span, field)]

    for node in find_fields(model, Span(0, len(model)), MODEL_GRAPH, GRAPH_NODE):
        entries = list(find_fields(model, node, NODE_METADATA))
        modules = [read(entry, ENTRY_VALUE)[0] for entry in entries if read(entry, ENTRY_KEY) == [MODULE]]
        modules += [name.partition(WEIGHT)[0] for name in read(node, NODE_INPUT) if WEIGHT in name]
        if modules:
            yield "".join(read(node, NODE_NAME)), modules[0]


def name_node(operator: str, name: str, modules: dict[str, str]) -> str:
    """Return a node in words: "GroupQueryAttention 'node_1' of h.0.attn".

    ONNX Runtime calls a node that it fused after the first of them: "node_MatMul_2/MatMulAddFusion".
    """
    parts = name.split("/")
    known = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]
    module = next((modules[own] for own in known if own in modules), "")
    words = f"{operator} {name!r}" if name else f"{operator} without a name"
    return f"{words} of {module}" if module else words
