"""Reads which parameters and caches a graph's nodes read, and whether ids reach the tables as they came.

Right values do not make a right graph: a product may add another layer's bias, or none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ...runtime.backends.backend import Array, Arrays
from ..passes.quantized_weight import StoredWeight
from ..passes.weights import Stored
from ..tracing.modules import MODULE, find_layer, find_module, find_scope
from .attributes import describe_node

FUSED = ("BiasGelu", "FastGelu", "Gelu")  # add the bias of the product before
LOOKUPS = ("Gather", "GatherBlockQuantized")
IDS = ("input_ids", "token_type_ids", "decoder_input_ids")  # inputs whose numbers are rows of a table
CACHE = re.compile(r"(?:cache|past_key_values|present|cross)\.(\d+)\.(?:key|value)")
SAME = ("Cast", "Identity")  # give the ids that they read


def find_wrong_parameters(
    graph: ir.Graph, tensors: Arrays, stored: Sequence[StoredWeight], is_ours: bool
) -> Iterator[str]:
    """Yield the nodes that read another module's parameter, and the parameters that nobody reads.

    Another exporter may store equal parameters once, fold some, and leave out what it likes: of its graphs
    only nodes are looked at whose names have their modules.
    """
    quantized = {weight.node: weight for weight in stored}
    biases = {weight.biases: weight.bias_names for weight in stored}
    read: dict[str, ir.Node] = {}
    for node in graph:
        weight = quantized.get(node)
        modules = [node.metadata_props.get(MODULE) or find_scope(node)]  # as tracing noted it, or as named
        if weight is not None:
            modules = [name.rpartition(".")[0] for name in weight.names]
        for index, value in enumerate(node.inputs):
            if value is None or value.const_value is None:
                continue
            if weight is not None and value is weight.codes:
                names = weight.names
            else:
                names = biases.get(value, (Stored.read(value).parameter,))
            # As DeBERTa's table of distances is.
            is_normalized = index == 0 and "Normalization" in node.op_type
            for name in names:
                if name not in tensors:
                    continue
                read.setdefault(name, node)
                if not is_normalized:
                    yield from describe_foreign(node, name, tensors, modules, is_ours)
    if is_ours:
        yield from find_unread(read, tensors)


def describe_foreign(
    node: ir.Node, name: str, tensors: Arrays, modules: Sequence[str], is_ours: bool
) -> Iterator[str]:
    """Yield in words that a node reads a parameter which is not its module's."""
    owner, _, kind = name.rpartition(".")
    if not any(modules) or any(owner == module or owner.startswith(f"{module}.") for module in modules):
        return
    own = [f"{module}.{kind}" for module in modules if f"{module}.{kind}" in tensors]
    if own:
        if not any(has_equal(tensors, meant, name) for meant in own):
            yield f"{describe_node(node)} reads {name!r}, where {own[0]!r} belongs"
    elif is_ours and find_layer(owner) is not None and not is_fused_bias(node, modules[0], owner):
        yield f"{describe_node(node)} reads {name!r}, which is another module's"


def is_fused_bias(node: ir.Node, module: str, owner: str) -> bool:
    """Tell whether a node adds the bias of a product beside its own module."""
    return node.op_type in FUSED and module.rpartition(".")[0] == owner.rpartition(".")[0]


def has_equal(tensors: Arrays, one: str, other: str) -> bool:
    """Tell whether two parameters hold the same numbers."""
    first: Array = tensors[one]
    second: Array = tensors[other]
    return first.shape == second.shape and bool(np.array_equal(first, second))


def find_unread(read: Mapping[str, ir.Node], tensors: Arrays) -> Iterator[str]:
    """Yield the parameters that no node reads, though others of their module or the same of other layers are.

    A graph without some of a model's outputs needs whole modules less, in all layers.
    """
    modules = {name.rpartition(".")[0]: name for name in read}
    kinds = {generalize(name): name for name in read}
    for name in tensors:
        if name in read:
            continue
        other = modules.get(name.rpartition(".")[0]) or kinds.get(generalize(name))
        if other is not None and not any(has_equal(tensors, name, x) for x in read):
            yield f"no node reads {name!r}, though {describe_node(read[other])} reads {other!r}"


def generalize(name: str) -> str:
    """Return a parameter's name without the number of its layer."""
    return re.sub(r"\.\d+\.", ".#.", name)


def find_foreign_caches(graph: ir.Graph) -> Iterator[str]:
    """Yield the nodes that read or give another layer's keys or values, in the cache's names."""
    for node in graph:
        layer = find_layer(find_module(node))
        read = [value for value in node.inputs if value is not None and value.is_graph_input()]
        given = [value for value in node.outputs if value.is_graph_output()]
        for value in (*read, *given):
            cache = CACHE.fullmatch(str(value.name))
            if cache is None or layer is None or node.op_type == "Shape":
                continue
            if int(cache[1]) != layer:
                yield f"{describe_node(node)} has the cache {value.name!r}, and is in layer {layer}"


def find_altered_ids(graph: ir.Graph) -> Iterator[str]:
    """Yield the tables of words or segments whose ids are not read as the graph's input gives them."""
    for node in graph:
        table = node.inputs[0] if node.op_type in LOOKUPS else None
        ids = node.inputs[1] if table is not None and table.const_value is not None else None
        if ids is None:
            continue
        between = find_between(ids)
        if between is not None:
            yield f"{describe_node(node)} reads ids that {describe_node(between)} may have altered"


def find_between(ids: ir.Value) -> ir.Node | None:
    """Return the node that gives ids made of those of an input; None where they are the input's or no ids."""
    first = None
    waiting = [ids]
    seen = set()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            if value.is_graph_input() and str(value.name) in IDS:
                return first
            continue
        if node.op_type == "Shape":
            continue
        if first is None and node.op_type not in SAME:
            first = node
        waiting += [x for x in node.inputs if x is not None]
    return None
