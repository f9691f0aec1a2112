"""Inlines branches that a graph always takes, or that a caller chooses.

optimum merges a decoder's first and later steps into the two branches of an If; DeBERTa tests in each layer
whether queries are as many as keys, which they always are.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from .evaluate import evaluate

SWITCH = "use_cache_branch"  # the input of a merged decoder: true for later steps
SHAPES = ((1, 1), (1, 2), (3, 7), (2, 40))  # shapes of the ids that a condition is tried with


def decide_branches(model: ir.Model) -> None:
    """Replace each If that takes the same branch for sequences of any shape by that branch."""
    found = [node for node in model.graph if node.op_type == "If"]
    if not found:
        return

    names = [str(node.inputs[0].name) for node in found if node.inputs[0] is not None]
    runs = evaluate(model, names, lambda _: [np.ones(shape, np.int64) for shape in SHAPES])
    for node, *answers in zip(found, *runs, strict=True):
        taken = {bool(answer) for answer in answers}
        if len(taken) == 1:
            inline_branch(node, "then_branch" if taken.pop() else "else_branch")
    common.RemoveUnusedNodesPass()(model)


def choose_branch(model: ir.Model, branch: str) -> None:
    """Take one branch wherever `SWITCH` decides, and drop that input."""
    for node in list(model.graph):
        if node.op_type == "If" and node.inputs[0] is not None and node.inputs[0].name == SWITCH:
            inline_branch(node, branch)
    for value in [value for value in model.graph.inputs if value.name == SWITCH]:
        model.graph.inputs.remove(value)
    common.RemoveUnusedNodesPass()(model)


def inline_branch(node: ir.Node, branch: str) -> None:
    """Move a branch's nodes and constants to where its If stands."""
    outer = node.graph
    inner = node.attributes[branch].as_graph()
    assert isinstance(outer, ir.Graph)
    results = list(inner.outputs)
    inner.outputs.clear()
    for value in list(inner.initializers.values()):
        inner.initializers.pop(str(value.name))
        while value.name in outer.initializers:
            value.name = f"{value.name}.inner"
        outer.register_initializer(value)
    nodes = list(inner)
    inner.remove(nodes)
    outer.insert_before(node, nodes)
    for old, new in zip(node.outputs, results, strict=True):
        name = old.name
        is_output = old.is_graph_output()
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        if is_output:
            old.name = None
            new.name = name
    outer.remove(node, safe=True)
