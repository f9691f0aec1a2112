"""Records in a traced graph which PyTorch module each node belongs to."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

SCOPES = "pkg.torch.onnx.name_scopes"  # what tracing leaves: "['', 'model.h.0', 'model.h.0.attn', 'softmax']"
MODULE = "planforge.module"  # a node's key: "h.0.attn"
RESULTS = "planforge.results"  # a graph's key, as JSON: the values that are a module's result, and its path
WRAPPER = "model."  # a dialect's module has the reference model below this name


def record_modules(model: ir.Model) -> None:
    """Write each node's module, and the graph's `RESULTS`, from the scopes that tracing left."""
    results: dict[str, str] = {}
    for node in model.graph:
        scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))  # the outermost first
        paths = [scope.removeprefix(WRAPPER) for scope in scopes[:-1] if scope.startswith(WRAPPER)]
        if paths:
            node.metadata_props[MODULE] = paths[-1]
        for path in paths:  # the last of a module's nodes gives its result
            results[path] = str(node.outputs[0].name)
    model.graph.metadata_props[RESULTS] = json.dumps({value: path for path, value in results.items()})


def keep_only_modules(model: ir.Model) -> None:
    """Drop all other metadata, and results that a simplification removed."""
    names = {value.name for node in model.graph for value in node.outputs}
    results = {value: path for value, path in read_results(model).items() if value in names}
    for node in model.graph:
        module = node.metadata_props.get(MODULE)
        node.metadata_props.clear()
        node.doc_string = None
        if module is not None:
            node.metadata_props[MODULE] = module
    model.graph.metadata_props.clear()
    model.graph.metadata_props[RESULTS] = json.dumps(results)


def read_results(model: ir.Model) -> dict[str, str]:
    """Return the path of the module that gives each value, by the value's name."""
    found = json.loads(model.graph.metadata_props.get(RESULTS, "{}"))
    return {str(value): str(path) for value, path in found.items()}


def find_module(node: ir.Node) -> str:
    """Return the path of a node's module; for a pass's node that of its weights' module; else ""."""
    return node.metadata_props.get(MODULE) or find_scope(node) or find_module_of_weights(node)


def find_scope(node: ir.Node) -> str:
    """Return the module in a node's name from torch's older exporter: h.0 of "/h.0/MatMul"; else ""."""
    name = str(node.name or "")
    return ".".join(name.split("/")[1:-1]) if name.startswith("/") else ""


def find_results_by_scope(graph: ir.Graph, paths: Collection[str]) -> dict[str, str]:
    """Return the values that are a module's result, with its path, where nodes' names tell their modules.

    A module's result is the one value that nodes of other modules read; where they read several, none is.
    """
    known = set(paths)
    by_modules: dict[str, set[str]] = {}
    by_others: dict[str, set[str]] = {}  # nodes without a module in their names, such as an import's own
    for node in graph:
        scope = find_scope(node)
        for value in node.outputs:
            readers = [find_scope(reader) for reader, _ in value.uses()]
            for path in known.intersection(list_enclosing_paths(scope)):
                if any(reader and path not in list_enclosing_paths(reader) for reader in readers):
                    by_modules.setdefault(path, set()).add(str(value.name))
                elif not all(readers) or (value.is_graph_output() and not readers):
                    by_others.setdefault(path, set()).add(str(value.name))
    read_outside = {**by_others, **by_modules}
    single = {path: min(names) for path, names in read_outside.items() if len(names) == 1}
    # Where a module and one inside it have the same result, the inner one counts: it says more.
    return {name: path for path, name in sorted(single.items(), key=lambda item: len(item[0]))}


def list_enclosing_paths(path: str) -> list[str]:
    """Return a module's path and those of the modules around it: h, h.0 and h.0.attn for h.0.attn."""
    parts = path.split(".") if path else []
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def find_module_of_weights(node: ir.Node) -> str:
    """Return the module in the names of a node's weights; else ""."""
    weights = [
        str(v.name) for v in node.inputs if v is not None and v.is_initializer() and "." in str(v.name)
    ]
    return re.sub(r"\.(weight|bias)\b.*$", "", weights[0]) if weights else ""


def find_layer(path: str) -> int | None:
    """Return the layer in a module's path: 3 of "h.3.attn"."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(number[1]) if number else None


def find_module_results(graph: ir.Model, paths: Sequence[str] = ()) -> Mapping[str, str]:
    """Return the values that are a module's result, as tracing recorded them, or as nodes' names tell."""
    paths = paths or list(dict.fromkeys(find_scope(node) for node in graph.graph))
    return read_results(graph) or find_results_by_scope(graph.graph, paths)
