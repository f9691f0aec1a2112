"""Which PyTorch module each node of a traced graph computes a part of, written into the graph itself."""

from __future__ import annotations

import ast
import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

SCOPES = "pkg.torch.onnx.name_scopes"  # what tracing leaves: "['', 'model.h.0', 'model.h.0.attn', 'softmax']"
MODULE = "planforge.module"  # of a node: "h.0.attn"
RESULTS = "planforge.results"  # of a graph, as JSON: the values that are a module's result, and its path
WRAPPER = "model."  # a dialect's module has the reference model below this name


def note_modules(model: ir.Model) -> None:
    """Writes each node's module, and the graph's `RESULTS`, in place of what tracing says of both."""
    results: dict[str, str] = {}
    for node in model.graph:
        paths = scopes_of(node)
        if paths:
            node.metadata_props[MODULE] = paths[-1]
        for path in paths:  # the last of a module's nodes gives its result
            results[path] = str(node.outputs[0].name)
    model.graph.metadata_props[RESULTS] = json.dumps({value: path for path, value in results.items()})


def scopes_of(node: ir.Node) -> list[str]:
    """The modules around a traced node, outermost first."""
    scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
    return [scope.removeprefix(WRAPPER) for scope in scopes[:-1] if scope.startswith(WRAPPER)]


def keep_only_modules(model: ir.Model) -> None:
    """Drops all other metadata, and results that a simplification has removed."""
    names = {value.name for node in model.graph for value in node.outputs}
    results = {value: path for value, path in results_of(model).items() if value in names}
    for node in model.graph:
        module = node.metadata_props.get(MODULE)
        node.metadata_props.clear()
        node.doc_string = None
        if module is not None:
            node.metadata_props[MODULE] = module
    model.graph.metadata_props.clear()
    model.graph.metadata_props[RESULTS] = json.dumps(results)


def results_of(model: ir.Model) -> dict[str, str]:
    """The path of the module that each of these values is the result of, by the value's name."""
    found = json.loads(model.graph.metadata_props.get(RESULTS, "{}"))
    return {str(value): str(path) for value, path in found.items()}


def module_of(node: ir.Node) -> str:
    """The path of a node's module; of a node that a pass has made, by the weights that it reads; else ""."""
    if MODULE in node.metadata_props:
        return node.metadata_props[MODULE]
    weights = [
        str(v.name) for v in node.inputs if v is not None and v.is_initializer() and "." in str(v.name)
    ]
    return re.sub(r"\.(weight|bias)\b.*$", "", weights[0]) if weights else ""


def layer_of(path: str) -> int | None:
    """The layer that a module's path names: 3 of "h.3.attn"."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(number[1]) if number else None
