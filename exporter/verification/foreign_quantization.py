"""Compares how an import's nodes are quantized with the author's own graph: by the same numbers, bit for bit.

Of rounded activations this is half of the comparison: results are compared without their rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir

from ..imported.signature import POOLED
from ..passes.quantization_form import DEQUANTIZES, KEPT, OPERATORS
from ..tracing.modules import find_module

# By a node's name and the number of its input: how that is quantized.
Quantization: TypeAlias = Mapping["tuple[str, int]", "Sequence[tuple[Any, ...]]"]
PASSES_ON = ("Cast", "Identity")
READS_NO_VALUES = ("Shape", "Size")
CACHES = "present."  # begins the names of outputs that are keys and values
INPUTS = ("data", "scale", "zero point")


def describe_quantization(model: ir.Model, known: Collection[str]) -> Quantization:
    """Return how inputs of known nodes, by name, are quantized by somebody else's nodes.

    What a pass added before them is passed by. Nodes of two branches may share a name.
    """
    found: dict[tuple[str, int], list[tuple[Any, ...]]] = {}
    for node in (node for graph in model.graphs() for node in graph):
        if node.op_type == DEQUANTIZES and KEPT in node.metadata_props:
            for reader in find_readers(node.outputs[0], known):
                found.setdefault(reader, []).append(describe_node(node))
    return found


def describe_outputs(model: ir.Model) -> Mapping[str, tuple[Any, ...] | None]:
    """Return by name how outputs are quantized right before they are given; None for those that are not.

    Caches are left out: an attention over shared buffers gives them in the place of what it reads.
    """
    found: dict[str, tuple[Any, ...] | None] = {}
    for value in model.graph.outputs:
        node = value.producer()
        while node is not None and node.op_type in PASSES_ON:
            node = node.inputs[0].producer() if node.inputs[0] is not None else None
        is_kept = node is not None and node.op_type == DEQUANTIZES and KEPT in node.metadata_props
        if not str(value.name).startswith(CACHES):
            found[str(value.name)] = describe_node(node) if node is not None and is_kept else None
    return found


def find_readers(value: ir.Value, known: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield the first nodes of known names that read a value, with the numbers of their inputs."""
    for use in value.uses():
        if use.node.op_type in READS_NO_VALUES:
            continue
        if str(use.node.name) in known and use.node.op_type not in PASSES_ON:
            yield str(use.node.name), use.idx
        else:
            for output in use.node.outputs:
                yield from find_readers(output, known)


def describe_node(node: ir.Node) -> tuple[Any, ...]:
    """Return all that a node's results depend on, but for what the graph computes: constants bit for bit."""
    attributes = sorted((name, repr(attribute.value)) for name, attribute in node.attributes.items())
    return node.op_type, tuple(attributes), tuple(map(describe_input, node.inputs))


def describe_input(value: ir.Value | None) -> tuple[Any, ...]:
    """Return a constant's type, shape and bits; of another node of the kind what it does; else nothing."""
    if constant := describe_constant(value):
        return constant
    producer = None if value is None else value.producer()
    return describe_node(producer) if producer is not None and producer.op_type in OPERATORS else ()


def describe_constant(value: ir.Value | None) -> tuple[Any, ...]:
    """Return a constant's type, shape and bits; nothing for what a graph computes."""
    constant = None if value is None else ir.convenience.get_const_tensor(value)
    if constant is None:
        return ()
    digest = hashlib.sha256(constant.tobytes()).hexdigest()
    return str(constant.dtype), tuple(constant.shape.numpy()), digest


def find_unlike(model: ir.Model, folder: ir.Model) -> Iterator[str]:
    """Yield in words which inputs of nodes, and outputs, are quantized otherwise than in the folder's graph.

    A branch may not be taken, a vector that the folder pools is left out, and of nodes that compute the same
    an import keeps one.
    """
    needed = {str(node.name) for node in list_needed(folder.graph)}
    known = {str(node.name) for graph in folder.graphs() for node in graph}
    wanted = describe_quantization(folder, known)
    found = describe_quantization(model, known)
    here = {str(node.name): node for node in model.graph}
    twins: Mapping[str, Collection[str]] | None = None
    for name, index in dict.fromkeys((*wanted, *found)):
        if name not in here:
            twins = find_twins(folder.graph) if twins is None and name in needed else twins
            if twins and name in needed and here.keys().isdisjoint(twins[name]):
                yield f"node {name!r}, whose input {index} the folder's graph quantizes, is not there"
            continue
        expected = wanted.get((name, index), [None])
        unlike = [one for one in found.get((name, index), [None]) if one not in expected]
        if unlike:
            module = find_module(here[name])
            at = f" in {module}" if module else ""
            fault = find_difference(unlike[0], expected[0])
            yield f"node {name!r} ({here[name].op_type}){at}: its input {index} {fault} in the folder's graph"
    outputs = describe_outputs(model)
    for name, rounding in describe_outputs(folder).items():
        if name in outputs and outputs[name] != rounding:
            yield f"output {name!r} {find_difference(outputs[name], rounding)} in the folder's graph"


def list_needed(graph: ir.Graph) -> Collection[ir.Node]:
    """Return the nodes that an import's outputs are computed from, not by their shapes alone."""
    waiting: list[ir.Value | None] = [value for value in graph.outputs if value.name not in POOLED]
    found: dict[ir.Node, None] = {}
    while waiting:
        value = waiting.pop()
        node = None if value is None else value.producer()
        if node is None or node in found:
            continue
        found[node] = None
        branches = [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
        inner = [one for branch in branches for one in ir.traversal.RecursiveGraphIterator(branch)]
        waiting += [value for branch in branches for value in branch.outputs]
        for reader in (node, *inner):
            if reader.op_type not in READS_NO_VALUES:
                waiting += reader.inputs
    return found


def find_twins(graph: ir.Graph) -> Mapping[str, Collection[str]]:
    """Return for each node's name the names of all nodes that compute the same, its own among them."""
    numbers: dict[Any, int] = {}  # of a computation: by operator, attributes and inputs
    computed: dict[ir.Value | None, tuple[Any, ...]] = {None: ()}
    groups: dict[int, list[str]] = {}
    for node in graph:  # in the order in which they run
        attributes = sorted((name, repr(attribute.value)) for name, attribute in node.attributes.items())
        inputs = tuple(describe_constant(v) or computed.get(v, (v,)) for v in node.inputs)
        key = (node.domain, node.op_type, tuple(attributes), inputs)
        number = numbers.setdefault(key, len(numbers))
        groups.setdefault(number, []).append(str(node.name))
        computed.update({output: (number, place) for place, output in enumerate(node.outputs)})
    return {name: names for names in groups.values() for name in names}


def find_difference(found: tuple[Any, ...] | None, wanted: tuple[Any, ...] | None) -> str:
    """Return in words how an input is quantized otherwise than `wanted`, which it is."""
    if found is None or wanted is None:
        return "is not quantized, as it is" if found is None else "is quantized, as it is not"
    if found[0] != wanted[0] or len(found[2]) != len(wanted[2]):
        return f"is read through another {found[0]} than"
    if found[1] != wanted[1]:
        return f"is read through a {found[0]} with other attributes than"
    for what, mine, theirs in zip(INPUTS, found[2], wanted[2], strict=False):
        if mine != theirs:
            nested = bool(mine) and bool(theirs) and {mine[0], theirs[0]} <= set(OPERATORS)
            return find_difference(mine, theirs) if nested else f"has another {what} of its {found[0]} than"
    raise AssertionError("one of the parts differs")
