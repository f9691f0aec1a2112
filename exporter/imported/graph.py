"""Changes imported graphs: simpler nodes, finite masks, and logits of chosen rows.

B batch, T tokens of this step, G heads of keys and values, D head size, N logit rows, V vocabulary
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer
from onnx_ir.passes import common

from ...models.masked import MASKED
from ..errors import ExportError
from ..passes.build import Builder
from ..passes.rows import gather_rows
from ..tracing.graph_check import read_axis_name
from .branches import decide_branches

PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
LOWEST = -1e30  # a mask's numbers below this hide something
MAX_MASK_VALUES = 2**20  # numbers that a mask may have
BETWEEN_HEAD_AND_LOGITS = ("Add", "Cast", "Div", "Mul", "Tanh")  # a bias, a type, soft caps


@dataclass(frozen=True)
class Heads:
    """The sizes of a decoder's attention."""

    layers: int
    cached: int  # G
    size: int  # D


def simplify_graph(model: ir.Model) -> None:
    """Fold the shape arithmetic that tracing left behind, and make every constant an initializer."""
    decide_branches(model)
    read_batch_from_ids(model.graph)
    onnxscript.optimizer.optimize_ir(model, num_iterations=1)  # more find nothing, and take a second each
    for each in (
        common.IdentityEliminationPass(),
        common.LiftConstantsToInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
    ):
        each(model)
    make_masks_finite(model.graph)


def read_batch_from_ids(graph: ir.Graph) -> None:
    """Let each Shape that reads the batch from a cache read it from the ids, which have the same."""
    ids = next((value for value in graph.inputs if value.name == "input_ids"), None)
    caches = [value for value in graph.inputs if str(value.name).startswith("past")]
    for use in [use for value in caches for use in value.uses()]:
        end = use.node.attributes.get_int("end", 0)
        if use.node.op_type == "Shape" and end == 1 and ids is not None:
            use.node.replace_input_with(0, ids)


def make_masks_finite(graph: ir.Graph) -> None:
    """Replace a mask's lowest numbers by one that fp16 can represent: the softmax of both is 0."""
    for value in graph.initializers.values():
        constant = value.const_value
        if constant is None or constant.dtype != ir.DataType.FLOAT or constant.size > MAX_MASK_VALUES:
            continue
        array = constant.numpy()
        if (array < LOWEST).any():
            finite = np.where(array < LOWEST, np.float32(MASKED), array)
            value.const_value = ir.tensor(finite, name=value.name)


def read_heads(model: ir.Model) -> Heads:
    """Return the sizes of attention, by the shapes of the cached inputs."""
    past = {str(v.name): v for v in model.graph.inputs if PAST.fullmatch(str(v.name))}
    shapes = {tuple(read_axis_name(d) for d in v.shape or ())[1::2] for v in past.values()}
    if len(shapes) != 1 or not all(len(s) == 2 and all(isinstance(n, int) for n in s) for s in shapes):
        raise ExportError(f"the layers' caches have different shapes {sorted(map(str, shapes))}")
    ((cached, size),) = shapes
    assert isinstance(cached, int) and isinstance(size, int)
    return Heads(len(past) // 2, cached, size)


def choose_rows(model: ir.Model) -> None:
    """Add the input logit_rows (N,): the head multiplies those rows alone, and logits are (N, V)."""
    graph = model.graph
    logits = next(value for value in graph.outputs if value.name == "logits")
    head = require_producer(logits)
    between = [head]
    while head.op_type not in ("MatMul", "Gemm"):
        given = [v for v in head.inputs if v is not None and v.const_value is None]
        if head.op_type not in BETWEEN_HEAD_AND_LOGITS or len(given) != 1:
            raise ExportError(f"no MatMul or Gemm that computes the logits was found before {head.op_type}")
        head = require_producer(given[0])
        between.append(head)
    states = head.inputs[0]
    assert states is not None
    rows = add_input(graph, "logit_rows", ["rows"])
    shape = ir.Shape(["rows", read_width(head)])
    head.replace_input_with(0, gather_rows(Builder(graph, head, "logit_rows"), states, rows, shape))
    vocabulary = read_vocab_size(model)
    for node in between:
        node.outputs[0].shape = ir.Shape(["rows", vocabulary])


def read_width(product: ir.Node) -> int:
    weight = product.inputs[1]
    if weight is None or weight.shape is None or len(weight.shape) != 2:
        raise ExportError("the head's weight is not a matrix")
    by_rows = product.op_type == "Gemm" and product.attributes.get_int("transB", 0) == 1
    return int(weight.shape.numpy()[1 if by_rows else 0])


def read_vocab_size(model: ir.Model) -> int:
    logits = next(value for value in model.graph.outputs if value.name == "logits")
    length = None if logits.shape is None else logits.shape[-1]
    if not isinstance(length, int):
        raise ExportError("the logits' last axis has no fixed length")
    return length


def require_producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    if node is None:
        raise ExportError(f"{value.name!r} is computed by no node")
    return node


def add_input(
    graph: ir.Graph, name: str, axes: Sequence[str], dtype: ir.DataType = ir.DataType.INT64
) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(axes))
    graph.inputs.append(value)
    return value


def depends_on_shapes(value: ir.Value | None) -> bool:
    """Tell whether a value is computed from the shapes of others, and from nothing else that varies."""
    if value is None:
        return False
    nodes = list(walk_back(value))
    read = [v for node in nodes if node.op_type != "Shape" for v in node.inputs if v is not None]
    varies = any(v.producer() is None and v.const_value is None for v in read)
    return not varies and any(node.op_type == "Shape" for node in nodes)


def walk_back(value: ir.Value) -> Iterator[ir.Node]:
    """Yield the nodes that compute a value, back to those that only read a shape."""
    waiting = [value]
    seen = set()
    while waiting:
        node = waiting.pop().producer()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if node.op_type != "Shape":
            waiting += [v for v in node.inputs if v is not None]
