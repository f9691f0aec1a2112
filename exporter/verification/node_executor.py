"""Executes a graph node by node, so that every result is rounded to the type that the graph gives it.

ONNX Runtime computes fp16 on a CPU in fp32, and drops the roundings between nodes: a graph that is NaN on a
GPU passes there. Alone in a session of its own, each node must round its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Array = npt.NDArray[Any]


class NotFiniteError(ValueError):
    """A node's result left the finite numbers; names the node, its type and the range it read."""


class NodeExecutor:
    """Runs a whole graph, one ONNX Runtime session per kind of node.

    Args:
        model: any graph whose nodes ONNX Runtime has kernels for.
    """

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self.opsets = dict(model.graph.opset_imports)
        self.sessions: dict[tuple[Any, ...], Any] = {}
        self.constants = {
            value: value.const_value.numpy()
            for value in model.graph.initializers.values()
            if value.const_value is not None
        }
        self.largest = 0.0  # of all finite results so far

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """All graph outputs by name.

        Raises:
            NotFiniteError: at the first node with a NaN or an infinity.
        """
        values: dict[ir.Value, Array] = dict(self.constants)
        for value in self.graph.inputs:
            values[value] = inputs[str(value.name)]
        last_use = {value: node for node in self.graph for value in node.inputs if value is not None}
        keep = set(self.graph.outputs) | set(self.constants)
        for node in self.graph:
            feeds = [None if value is None else values[value] for value in node.inputs]
            for output, array in zip(node.outputs, self.run_node(node, feeds), strict=True):
                self.check(node, output, array, feeds)
                values[output] = array
            for read in node.inputs:
                if read is not None and read not in keep and last_use[read] is node:
                    values.pop(read, None)
        return {str(value.name): values[value] for value in self.graph.outputs}

    def run_node(self, node: ir.Node, feeds: list[Array | None]) -> list[Array]:
        key = (
            node.domain,
            node.op_type,
            tuple(sorted((name, str(attribute.value)) for name, attribute in node.attributes.items())),
            tuple(None if feed is None else feed.dtype.name for feed in feeds),
            len(node.outputs),
        )
        if key not in self.sessions:
            self.sessions[key] = self.session_for(node, feeds)
        bound = {f"in{i}": feed for i, feed in enumerate(feeds) if feed is not None}
        return self.sessions[key].run(None, bound)  # type: ignore[no-any-return]

    def session_for(self, node: ir.Node, feeds: list[Array | None]) -> Any:
        """A session of just this node, with inputs of any shape."""
        import onnxruntime as ort

        inputs = [
            None if feed is None else ir.Value(name=f"in{i}", type=tensor_type(feed))
            for i, feed in enumerate(feeds)
        ]
        outputs = [ir.Value(name=f"out{i}", type=value.type) for i, value in enumerate(node.outputs)]
        alone = ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), outputs=outputs)
        graph = ir.Graph(
            [value for value in inputs if value is not None],
            outputs,
            nodes=[alone],
            opset_imports=self.opsets,
            name="node",
        )
        proto = ir.to_proto(ir.Model(graph, ir_version=10))
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def check(self, node: ir.Node, output: ir.Value, array: Array, feeds: list[Array | None]) -> None:
        if not np.issubdtype(array.dtype, np.floating) or not array.size:
            return
        largest = float(np.abs(array).max())
        if not np.isfinite(largest):
            read = max(
                (float(np.abs(f).max()) for f in feeds if f is not None and f.size and f.dtype.kind == "f"),
                default=0.0,
            )
            raise NotFiniteError(
                f"node {node.name or output.name!r} ({node.op_type}, {array.dtype}) gives {largest};"
                f" what it read reaches {read:g}"
            )
        self.largest = max(self.largest, largest)


def tensor_type(array: Array) -> ir.TensorType:
    return ir.TensorType(ir.DataType.from_numpy(array.dtype))
