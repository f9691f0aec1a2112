"""Rules about the graph as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
from onnx.defs import OpSchema

from ..targets import Target
from .model import LintModel, has_input
from .rule import Hit, accept_all, make_rule

DAMAGED = "export again: the graph is damaged"


@make_rule("a node that reads what nothing computes", fix=DAMAGED, holds=accept_all, alike=True)
def check_tensor_undefined(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        for value in node.inputs:
            if value is not None and value.name and not value.is_graph_input():
                known = value.producer() is not None or value.is_initializer()
                if not known and value.graph is None:
                    yield Hit(f"reads {value.name!r}, which nothing computes", node)


@make_rule("nodes that wait for each other", fix=DAMAGED, holds=accept_all, alike=True)
def check_cycle(model: LintModel, target: Target) -> Iterator[Hit]:
    """Yield the nodes that are left when all nodes that can run have run: they wait for themselves."""
    waiting = {node: {v.producer() for v in node.inputs if v is not None} - {None} for node in model.nodes}
    readers: dict[ir.Node | None, list[ir.Node]] = {}
    for node, producers in waiting.items():
        for producer in producers:
            readers.setdefault(producer, []).append(node)
    ready = [node for node, producers in waiting.items() if not producers]
    while ready:
        done = ready.pop()
        del waiting[done]
        for node in readers.get(done, ()):
            waiting[node].discard(done)
            if not waiting[node]:
                ready.append(node)
    for node in waiting:
        yield Hit("waits for itself: the graph has a cycle", node)


@make_rule("a node without an input that it must have", fix=DAMAGED, holds=accept_all, alike=True)
def check_input_left_out(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.nodes:
        schema = model.find_schema(node)
        for index, formal in enumerate(schema.inputs if schema is not None else ()):
            if formal.option == OpSchema.FormalParameterOption.Single and not has_input(node, index):
                yield Hit(f"its input {formal.name} is left out, and must be there", node)


@make_rule(
    "an input that nothing reads",
    fix="remove it; a caller that feeds it expects an effect",
    severity="warning",
    alike=True,
)
def check_input_unused(model: LintModel, target: Target) -> Iterator[Hit]:
    for value in model.model.graph.inputs:
        if not value.uses() and not value.is_graph_output() and not value.is_initializer():
            yield Hit("nothing reads this input", tensor=str(value.name))
