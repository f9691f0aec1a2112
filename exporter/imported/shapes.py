"""Replaces shapes that a traced graph computes anew in each step by constants."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ..passes.weights import add_initializer

Axis = int | ir.SymbolicDim
ROUNDS = 3  # each round uses the shapes that the last one found


def fold_shapes(model: ir.Model) -> None:
    """Give each Reshape a constant where its axes follow from its input's, and drop moves that cancel.

    ONNX's shape inference, which traces shapes through arithmetic, finds what an axis follows from.
    """
    graph = model.graph
    drop_transposes_there_and_back(graph)
    for _ in range(ROUNDS):
        forget_shapes(graph)
        common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
        for node in [node for node in graph if node.op_type == "Reshape"]:
            fold_reshape(graph, node)
    common.RemoveUnusedNodesPass()(model)


def forget_shapes(graph: ir.Graph) -> None:
    """Drop shapes of computed values, whose axes have other names; keep those that ONNX cannot infer."""
    (ids,) = (value for value in graph.inputs if value.name == "input_ids")
    for node in graph:
        for result in node.outputs:
            if not result.is_graph_output():
                result.shape = None
        past = node.inputs[3] if node.op_type == "GroupQueryAttention" else None
        if past is not None and past.shape is not None and ids.shape is not None:
            size = past.shape[3]
            assert isinstance(size, int)
            node.outputs[0].shape = ir.Shape([*ids.shape, node.attributes["num_heads"].as_int() * size])


def drop_transposes_there_and_back(graph: ir.Graph) -> None:
    """Drop two Transposes in a row that restore a tensor."""
    for node in graph:
        inner = node.inputs[0].producer() if node.op_type == "Transpose" and node.inputs[0] else None
        if inner is None or inner.op_type != "Transpose" or inner.inputs[0] is None:
            continue
        first, second = (list(each.attributes["perm"].as_ints()) for each in (inner, node))
        if [first[axis] for axis in second] == sorted(first):
            ir.convenience.replace_all_uses_with(node.outputs[0], inner.inputs[0])


def fold_reshape(graph: ir.Graph, node: ir.Node) -> None:
    """Make a Reshape's target a constant, if that is known; drop a Reshape that changes nothing."""
    value = node.inputs[0]
    result = node.outputs[0]
    if value is None or value.shape is None or result.shape is None or node.attributes.get_int("allowzero"):
        return
    target = find_target(list(value.shape), list(result.shape))
    if target is None:
        return
    if target == [0] * len(value.shape) and not result.is_graph_output():
        ir.convenience.replace_all_uses_with(result, value)
        return
    constant = ir.tensor(np.array(target, np.int64))
    node.replace_input_with(1, add_initializer(graph, f"constant/int64/{target}", constant))


def find_target(given: Sequence[Axis], wanted: Sequence[Axis]) -> list[int] | None:
    """Return a Reshape's target: 0 keeps an axis, -1 follows from the others; None if two would."""
    found = [keep_or_size(given, place, axis) for place, axis in enumerate(wanted)]
    unknown = [place for place, size in enumerate(found) if size is None]
    if len(unknown) > 1:
        return None
    if unknown:
        (place,) = unknown
        kept = [place for place, size in enumerate(found) if size == 0]
        rest = [i for i, axis in enumerate(given) if not isinstance(axis, int) and i not in kept]
        sizes = math.prod(axis for axis in given if isinstance(axis, int))
        known = math.prod(size for size in found if size)
        if not rest and sizes % known == 0:
            found[place] = sizes // known
        else:
            found[place] = 0 if rest == [place] and sizes == known else -1
    return [size for size in found if size is not None]


def keep_or_size(given: Sequence[Axis], place: int, axis: Axis) -> int | None:
    if isinstance(axis, int):
        return axis or None
    named = axis.value is not None and place < len(given)
    return 0 if named and given[place] == axis else None
