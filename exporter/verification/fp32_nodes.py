"""Lists the nodes that an fp16 graph computes in fp32, with the reason and the size of their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ...runtime.apps.check.metrics import make_plain
from ...runtime.backends.backend import Array
from ...runtime.bundle.manifest import Artifact
from ..execution.node_executor import ExecutedProgram, NodeExecutor, NotFiniteError
from ..execution.replay import Replay
from ..passes.fp16_ranges import Fp32Reason
from ..tracing.modules import find_module
from .bisect import find_range


@dataclass(frozen=True)
class Fp32Node:
    """A node whose results stay in fp32, or whose weights are scaled."""

    node: str  # its name in the ONNX file
    op_type: str
    module: str  # the path of the PyTorch module that it computes a part of
    reason: str  # why it does not just become fp16
    low: float  # the range of its results on a little real text
    high: float
    group: str = ""  # the reason without what differs per node; empty where that is the reason
    reached: float | None = None  # the largest magnitude while calibrating, if that is the reason

    def to_json(self) -> dict[str, Any]:
        return {name: make_plain(value) for name, value in vars(self).items()}


def list_fp32_nodes(
    graph: ir.Model, artifact: Artifact, replay: Replay
) -> tuple[tuple[Fp32Node, ...], NotFiniteError | None]:
    """Return the fp32 nodes of one graph, in its order, up to the first one that is not finite, if any."""
    found: dict[str, Fp32Node] = {}

    def see(node: ir.Node, name: str, array: Array) -> None:
        choice = Fp32Reason.read(node)
        if choice is None or array.dtype.kind != "f" or not array.size:
            return
        key = str(node.name)
        low, high = find_range(array)
        if key in found:
            low = min(low, found[key].low)
            high = max(high, found[key].high)
        module = find_module(node)
        found[key] = Fp32Node(
            key, node.op_type, module, choice.reason, low, high, choice.group, choice.reached
        )

    try:
        replay.drive(ExecutedProgram(NodeExecutor(graph, see), artifact))
    except NotFiniteError as error:
        return tuple(found.values()), error
    return tuple(found.values()), None
