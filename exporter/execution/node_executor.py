"""Executes a graph node by node, so that every result is rounded to the type that the graph gives it.

ONNX Runtime computes fp16 on a CPU in fp32, and drops the roundings between nodes: a graph that is NaN on a
GPU passes there. Alone in a session of its own, each node must round its result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from ...runtime.backends.backend import Array, ArrayBuffer, Arrays, BoundGraph, Buffer, Buffers, Shape
from ...runtime.backends.ort_program import open_plain_session, wrap_ort_errors
from ...runtime.bundle.manifest import Artifact
from ...runtime.errors import BackendError
from .attention import MASKED_SCORES, RESULT, SCORES, WEIGHTS, AttentionParts
from .small_types import dequantize, is_of_small_type, is_to_fp8, quantize

NODE_BY_NODE = "node by node"
ROUNDING_ENGINE = f"{NODE_BY_NODE}, rounded to fp16"  # what stands for an engine that computes in fp16

GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
HOLDS = ("Constant", "ConstantOfShape")  # their results are in the file
CHOOSES = "If"  # runs one of its graphs, also node by node
# Operators whose results are numbers that they read, in other places.
MOVES = {
    "Concat",
    "Expand",
    "Flatten",
    "Gather",
    "GatherElements",
    "GatherND",
    "MaxPool",
    "Pad",
    "ReduceMax",
    "ReduceMin",
    "Reshape",
    "ScatterElements",
    "ScatterND",
    "Slice",
    "Split",
    "Squeeze",
    "TensorScatter",
    "Tile",
    "TopK",
    "Transpose",
    "Unsqueeze",
}

# Sees each result: the node, the result's name (or a part of an Attention: "y, scores"), and its numbers.
Observer: TypeAlias = Callable[[ir.Node, str, Array], None]


class NotFiniteError(ValueError):
    """A node's result, given by name and values, has a NaN or an infinity."""

    def __init__(self, node: ir.Node, result: str, array: Array, read: float) -> None:
        self.node = node
        self.result = result
        self.array = array
        super().__init__(
            f"node {node.name or result!r}, result {result!r} ({node.op_type}, {array.dtype}) gives"
            f" {float(np.abs(array).max())}; what it read reaches {read:g}"
        )


class NodeExecutor:
    """Runs a whole graph, one ONNX Runtime session per kind of node."""

    def __init__(self, model: ir.Model, observe: Observer | None = None) -> None:
        self.graph = model.graph
        self.observe = observe
        self.sessions: dict[tuple[Any, ...], Any] = {}
        self.attributes: dict[ir.Node, tuple[bytes, ...]] = {}
        self.constants = {
            value: value.const_value.numpy()
            for graph in (model.graph, *model.graph.subgraphs())
            for value in graph.initializers.values()
            if value.const_value is not None
        }

    def run(self, inputs: Arrays) -> dict[str, Array]:
        """Run the graph and return all of its outputs by name; NotFiniteError tells of the first bad node."""
        values: dict[ir.Value, Array] = dict(self.constants)
        values |= {value: inputs[str(value.name)] for value in list_inputs(self.graph)}
        results = self.run_graph(self.graph, values)
        return {str(value.name): array for value, array in zip(self.graph.outputs, results, strict=True)}

    def run_graph(self, graph: ir.Graph, values: dict[ir.Value, Array]) -> list[Array]:
        """Return a graph's outputs; `values` holds its inputs, and drops those that are not read again."""
        last_use = {value: node for node in graph for value in list_read(node)}
        keep = set(graph.outputs) | set(self.constants)
        for node in graph:
            feeds = [None if value is None else values[value] for value in node.inputs]
            if node.op_type == CHOOSES:
                results = self.run_graph(choose_branch(node, feeds), dict(values))
            else:
                results = self.run_node(node, feeds)
            for output, array in zip(node.outputs, results, strict=True):
                self.check(node, str(output.name), array, feeds)
                values[output] = array
            for read in list_read(node):
                if read not in keep and last_use[read] is node:
                    values.pop(read, None)
        return [values[value] for value in graph.outputs]

    def run_node(self, node: ir.Node, feeds: list[Array | None]) -> list[Array]:
        if is_own_attention(node, feeds):
            present = [feed for feed in feeds if feed is not None]
            return [self.compute_attention(node, *present)]
        if is_of_small_type(node, feeds[0] if feeds else None):
            return [dequantize(node, *feeds)]  # type: ignore[arg-type]  # its first two inputs are not optional
        if len(feeds) > 2 and is_to_fp8(node, feeds[2]):
            return [quantize(node, *feeds)]  # type: ignore[arg-type]  # all three are there
        key = (
            node.domain,
            node.op_type,
            self.hash_attributes(node),
            tuple(None if feed is None else (feed.dtype.name, find_shape(node, feed)) for feed in feeds),
            tuple(value.dtype for value in node.outputs),
        )
        if key not in self.sessions:
            self.sessions[key] = self.open_session(node, feeds)
        bound = {f"in{i}": feed for i, feed in enumerate(feeds) if feed is not None}
        with wrap_ort_errors(f"node {node.name!r} ({node.op_type}) fails"):
            results: list[Array] = self.sessions[key].run(None, bound)
        if any(not isinstance(result, np.ndarray) for result in results):
            raise BackendError(f"node {node.name!r} ({node.op_type}) gives a sequence, not a tensor")
        return results

    def hash_attributes(self, node: ir.Node) -> tuple[bytes, ...]:
        """Return a key for a node's attributes, the same only for equal ones: a hash of the bytes of each."""
        if any(attribute.type in GRAPHS for attribute in node.attributes.values()):
            raise BackendError(f"node {node.name!r} ({node.op_type}) holds graphs of its own")
        if node not in self.attributes:
            protos = [ir.serde.serialize_attribute(node.attributes[name]) for name in sorted(node.attributes)]
            contents = [proto.SerializeToString(deterministic=True) for proto in protos]
            self.attributes[node] = tuple(hashlib.sha256(content).digest() for content in contents)
        return self.attributes[node]

    def compute_attention(self, node: ir.Node, q: Array, k: Array, v: Array, mask: Array) -> Array:
        """Compute Attention in parts, each rounded and shown: a single node would hide its scores."""
        shared = q.shape[1] // k.shape[1]  # queries' heads that read each head of keys and values
        if shared > 1:
            k = k.repeat(shared, axis=1)
            v = v.repeat(shared, axis=1)
        arrays = (q, k, v, mask)
        dtypes = tuple(array.dtype for array in arrays)
        scale = node.attributes["scale"].as_float()
        key = ("Attention", dtypes, scale)
        if key not in self.sessions:
            self.sessions[key] = AttentionParts(dtypes, scale)
        parts: dict[str, Array] = self.sessions[key].compute(*arrays)
        read = {SCORES: (q, k), MASKED_SCORES: (parts[SCORES], mask), WEIGHTS: (parts[MASKED_SCORES],)}
        for part, inputs in read.items():
            self.check(node, f"{node.outputs[0].name}, {part}", parts[part], inputs)
        return parts[RESULT]

    def open_session(self, node: ir.Node, feeds: list[Array | None]) -> Any:
        """Return a session of just this node."""
        inputs = [None if feed is None else make_input(f"in{i}", feed, node) for i, feed in enumerate(feeds)]
        kinds = [self.choose_type(node, value) for value in node.outputs]
        outputs = [ir.Value(name=f"out{i}", type=kind) for i, kind in enumerate(kinds)]
        attributes = [load_attribute(attribute) for attribute in node.attributes.values()]
        alone = ir.Node(node.domain, node.op_type, inputs, attributes, outputs=outputs)
        present = [value for value in inputs if value is not None]
        opsets = dict(self.graph.opset_imports)
        graph = ir.Graph(present, outputs, nodes=[alone], opset_imports=opsets, name="node")
        proto = ir.to_proto(ir.Model(graph, ir_version=10))
        with wrap_ort_errors(f"node {node.name!r} ({node.op_type}) cannot be run alone"):
            return open_plain_session(proto.SerializeToString(), optimized=False)

    def choose_type(self, node: ir.Node, result: ir.Value) -> ir.TypeProtocol | None:
        return result.type

    def check(self, node: ir.Node, name: str, array: Array, feeds: Sequence[Array | None]) -> None:
        """Show a result to the observer; raise NotFiniteError if the node made a NaN or an infinity."""
        if array.dtype.kind == "f" and not is_finite(array):
            floats = [f for f in feeds if f is not None and f.size and f.dtype.kind == "f"]
            if not is_inherited(node, array, floats):  # a mask may be -inf
                finite = (np.abs(f[np.isfinite(f)]).max(initial=0.0) for f in floats)
                raise NotFiniteError(node, name, array, max(map(float, finite), default=0.0))
        if self.observe is not None:
            self.observe(node, name, array)


class WideExecutor(NodeExecutor):
    """Computes everything that is fp16 or fp32 in fp32."""

    def __init__(self, model: ir.Model) -> None:
        super().__init__(model)
        self.constants = {value: widen(array) for value, array in self.constants.items()}

    def choose_type(self, node: ir.Node, result: ir.Value) -> ir.TypeProtocol | None:
        return None if result.dtype == ir.DataType.FLOAT16 else result.type  # what follows from its inputs

    def run(self, inputs: Arrays) -> dict[str, Array]:
        return super().run({name: widen(array) for name, array in inputs.items()})

    def run_node(self, node: ir.Node, feeds: list[Array | None]) -> list[Array]:
        if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT16:
            return [np.asarray(feeds[0], np.float32)]
        return [widen(result) for result in super().run_node(node, feeds)]


class ExecutedProgram:
    """`NodeExecutor` as a Program, so that the runtime's own code feeds it."""

    captures_steps = False

    def __init__(self, executor: NodeExecutor, artifact: Artifact) -> None:
        self.executor = executor
        self.runs = 0  # that have begun
        self.dtypes = {spec.name: spec.dtype for spec in (*artifact.inputs, *artifact.outputs)}

    def allocate(self, name: str, shape: Shape) -> Buffer:
        return ArrayBuffer(np.zeros(shape, self.dtypes[name]))

    def free_memory(self) -> int | None:
        return None

    def run(self, inputs: Arrays, buffers: Buffers, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        self.runs += 1
        arrays = {name: buffer.array for name, buffer in buffers.items() if isinstance(buffer, ArrayBuffer)}
        # What another graph gave may be in another precision.
        typed = {name: np.asarray(array, self.dtypes[name]) for name, array in {**arrays, **inputs}.items()}
        results = self.executor.run(typed)
        for name in arrays.keys() & results.keys():
            arrays[name][...] = results[name]
        return {name: array for name, array in results.items() if name not in arrays}

    def bind(self, buffers: Buffers, outputs: Sequence[str] | None = None, fixed: bool = False) -> BoundGraph:
        return partial(self.run, buffers=buffers, outputs=outputs)

    def close(self) -> None:
        del self.executor


def widen(array: Array) -> Array:
    """Return an array of fp16 in fp32, any other as it is."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


def list_read(node: ir.Node) -> list[ir.Value]:
    """Return the values that a node reads, also from within its graphs."""
    read = [value for value in node.inputs if value is not None]
    for graph in list_graphs(node):
        read += [value for inner in graph for value in list_read(inner)]
        read.extend(graph.outputs)
    return read


def list_graphs(node: ir.Node) -> list[ir.Graph]:
    """Return the graphs that a node holds itself, as If does."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found += attribute.as_graphs()
    return found


def choose_branch(node: ir.Node, feeds: Sequence[Array | None]) -> ir.Graph:
    """Return the graph that an If runs, by its condition."""
    return node.attributes["then_branch" if np.all(feeds[0]) else "else_branch"].as_graph()


def is_finite(array: Array) -> bool:
    """Tell whether an array of floats has no NaN and no infinity."""
    if array.dtype == np.float16:  # by its bits: numpy's own test takes ten times as long
        return bool(((array.view(np.uint16) & 0x7FFF) < 0x7C00).all())
    return bool(np.isfinite(array).all())


def is_inherited(node: ir.Node, result: Array, read: Sequence[Array]) -> bool:
    """Tell whether a result has no NaN, and infinities only where the node has read one."""
    if np.isnan(result).any():
        return False
    if node.op_type in (*HOLDS, CHOOSES):
        return True
    infinite = [np.isinf(array) for array in read]
    if node.op_type in MOVES:
        return any(array.any() for array in infinite)
    try:
        places = np.broadcast_arrays(np.isinf(result), *infinite)
    except ValueError:  # not computed number by number
        return False
    return places[0].shape == result.shape and bool((~places[0] | np.any(places[1:], axis=0)).all())


def load_attribute(attribute: ir.Attr) -> ir.Attr:
    """Return an attribute whose tensor is in memory: a session of one node has no folder to find it in."""
    if attribute.type != ir.AttributeType.TENSOR or not isinstance(attribute.value, ir.ExternalTensor):
        return attribute
    return ir.AttrTensor(attribute.name, ir.tensor(attribute.value.numpy(), name=attribute.value.name))


def list_inputs(graph: ir.Graph) -> list[ir.Value]:
    """Return the inputs that a graph has to be given: old files list their weights among them."""
    return [value for value in graph.inputs if str(value.name) not in graph.initializers]


def is_own_attention(node: ir.Node, feeds: Sequence[Array | None]) -> bool:
    """Tell whether a node is PlanForge's own Attention: q (B, H, T, D), k and v (B, K, S, D), mask, scale."""
    present = [feed for feed in feeds if feed is not None]
    return (
        node.op_type == "Attention"
        and len(present) == len(feeds) == 4
        and all(feed.ndim == 4 and feed.dtype.kind == "f" for feed in present)
        and present[0].shape[1] % present[1].shape[1] == 0
        and len(node.outputs) == 1
        and "scale" in node.attributes
        and not any(a.value for name, a in node.attributes.items() if name != "scale")
    )


def find_shape(node: ir.Node, feed: Array) -> Shape | None:
    """Return an input's shape if the operator needs it: only ONNX Runtime's own operators do."""
    return feed.shape if node.domain else None


def make_input(name: str, feed: Array, node: ir.Node) -> ir.Value:
    dtype = ir.TensorType(ir.DataType.from_numpy(feed.dtype))
    shape = find_shape(node, feed)
    return ir.Value(name=name, type=dtype, shape=None if shape is None else ir.Shape(shape))
