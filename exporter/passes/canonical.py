"""Compares two graphs node for node in canonical form: what they compute counts, not what values are called.

In canonical form every value is what its node computes of what, down to the graph's inputs and constants;
nodes whose result is what they read are left out, and operators that take their inputs in any order have them
sorted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from .weights import Stored

COMMUTATIVE = ("Add", "And", "Equal", "Max", "Mean", "Min", "Mul", "Or", "Sum", "Xor")
# What may be left out of a node where it is this: attributes with their defaults, by operator.
DEFAULTS: dict[tuple[str, str], object] = {
    ("Cast", "saturate"): 1,
    ("Gelu", "approximate"): "none",
    ("Gemm", "alpha"): 1.0,
    ("Gemm", "beta"): 1.0,
    ("Gemm", "transA"): 0,
    ("Gemm", "transB"): 0,
    ("LayerNormalization", "axis"): -1,
    ("LayerNormalization", "stash_type"): 1,
    ("Reshape", "allowzero"): 0,
    ("Shape", "start"): 0,
    ("Softmax", "axis"): -1,
    ("SimplifiedLayerNormalization", "axis"): -1,
}


@dataclass(frozen=True)
class Difference:
    """Where two graphs part: a node of the first, or None where it lacks one, and one of the second."""

    node: ir.Node | None
    other: ir.Node | None
    what: str


@dataclass
class CanonicalGraph:
    """A graph whose values have keys: equal keys mean equal computations."""

    graph: ir.Graph
    held: Collection[str] = ()  # constants that count by the parameter that they hold, not by their numbers
    keys: dict[ir.Value, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for value in self.graph.inputs:
            self.keys[value] = make_key("input", str(value.name), str(value.dtype), describe_shape(value))
        for value in self.graph.initializers.values():
            self.keys[value] = key_constant(value, self.held)
        for node in self.graph:
            for value in node.outputs:
                self.keys[value] = self.key_result(node, value)

    def key_result(self, node: ir.Node, value: ir.Value) -> str:
        """Return the key of a node's result."""
        if node.op_type == "Constant":
            return key_constant(value, self.held)
        read = [None if x is None else self.keys[x] for x in node.inputs]
        if node.op_type == "Identity" and read[0] is not None:
            return read[0]
        return make_key(describe_operator(node), str(value.index()), *map(str, self.order(node, read)))

    def order(self, node: ir.Node, keys: list[str | None]) -> list[str | None]:
        """Return the keys of what a node reads, without None behind; sorted where order does not count."""
        while keys and keys[-1] is None:
            keys = keys[:-1]
        return sorted(keys, key=str) if node.op_type in COMMUTATIVE else keys

    def skip(self, value: ir.Value) -> ir.Value:
        """Return the value that an Identity passes on."""
        node = value.producer()
        while node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
            value = node.inputs[0]
            node = value.producer()
        return value


def make_key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def describe_shape(value: ir.Value) -> str:
    return "" if value.shape is None else str(list(value.shape))


def key_constant(value: ir.Value, held: Collection[str] = ()) -> str:
    """Return the key of a constant: its numbers, or where it is `held` the parameter in it.

    Whether the numbers of those are right others tell, by the checkpoint.
    """
    constant = ir.convenience.get_const_tensor(value)
    if constant is None:
        return make_key("no constant", str(value.name))
    kind = (str(constant.dtype), str(list(constant.shape.numpy())))
    if Stored.read(value).parameter in held or str(value.name) in held:
        return make_key("parameter", *kind, describe_parameter(value))
    return make_key("numbers", *kind, hashlib.sha256(constant.numpy().tobytes()).hexdigest())


def describe_parameter(value: ir.Value) -> str:
    """Return which parameter a constant holds, and how."""
    stored = Stored.read(value)
    return f"{stored.parameter}, {stored.transposed}, {stored.shift}, {stored.first}"


def describe_operator(node: ir.Node) -> str:
    """Return a node's operator and attributes as text, without those that have their defaults."""
    shown = {
        name: describe_attribute(attribute)
        for name, attribute in node.attributes.items()
        if DEFAULTS.get((node.op_type, name), node) != attribute.value
    }
    return f"{node.domain}:{node.op_type} {sorted(shown.items())}"


def describe_attribute(attribute: ir.Attr) -> str:
    """Return an attribute's value as text."""
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return f"{tensor.dtype} {list(tensor.shape.numpy())} {tensor.numpy().tobytes().hex()}"
    return str(attribute.value)


def compare_graphs(
    graph: ir.Graph, other: ir.Graph, outputs: list[str], held: Collection[str] = ()
) -> Iterator[Difference]:
    """Yield where a graph parts from another one, seen from these outputs; each pair of nodes once."""
    one = CanonicalGraph(graph, held)
    two = CanonicalGraph(other, held)
    theirs = {str(value.name): value for value in other.outputs}
    ours = {str(value.name): value for value in graph.outputs}
    seen: set[tuple[ir.Value, ir.Value]] = set()
    told: set[tuple[ir.Node | None, ir.Node | None]] = set()
    waiting = [(ours[name], theirs[name]) for name in outputs if name in ours and name in theirs]
    for name in outputs:
        if (name in ours) != (name in theirs):
            yield Difference(None, None, f"has the output {name!r} in one of both only")
    while waiting:
        a, b = (canonical.skip(value) for canonical, value in zip((one, two), waiting.pop(), strict=True))
        if one.keys[a] == two.keys[b] or (a, b) in seen:
            continue
        seen.add((a, b))
        nodes = (a.producer(), b.producer())
        what = describe_difference(one, two, a, b)
        if what and nodes not in told:
            told.add(nodes)
            yield Difference(*nodes, what)
        if not what:
            waiting += pair_inputs(one, two, *nodes)


def pair_inputs(
    one: CanonicalGraph, two: CanonicalGraph, node: ir.Node | None, other: ir.Node | None
) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yield what two nodes of one kind read in the same places, where it is not the same."""
    assert node is not None and other is not None
    left = [x for x in node.inputs if x is not None]
    right = [x for x in other.inputs if x is not None]
    if node.op_type in COMMUTATIVE:  # what both read is no difference
        both = {one.keys[x] for x in left} & {two.keys[x] for x in right}
        left = [x for x in left if one.keys[x] not in both]
        right = [x for x in right if two.keys[x] not in both]
    yield from zip(left, right, strict=False)


def describe_difference(one: CanonicalGraph, two: CanonicalGraph, a: ir.Value, b: ir.Value) -> str:
    """Return how two values with different keys differ themselves; "" where what they are made of does."""
    node = a.producer()
    other = b.producer()
    if node is None or other is None or "Constant" in (node.op_type, other.op_type):
        return f"reads {describe_leaf(a)} where {describe_leaf(b)} belongs"
    if (node.domain, node.op_type) != (other.domain, other.op_type):
        return f"is {node.op_type}, and {other.op_type} belongs there"
    if describe_operator(node) != describe_operator(other):
        return describe_attributes(node, other)
    if a.index() != b.index():
        return f"is read by its result {a.index()}, not {b.index()}"
    present, meant = ([x is not None for x in n.inputs] for n in (node, other))
    while present and not present[-1]:
        present.pop()
    while meant and not meant[-1]:
        meant.pop()
    if present != meant:
        return f"reads {sum(present)} values, not {sum(meant)}"
    return ""


def describe_leaf(value: ir.Value) -> str:
    """Return an input, a constant or a computed value in words."""
    node = value.producer()
    constant = ir.convenience.get_const_tensor(value)
    if constant is not None and constant.size == 1:
        return f"the number {constant.numpy().item():g}"
    if constant is not None:
        return f"the constant {value.name!r} {list(constant.shape.numpy())}"
    return f"the input {value.name!r}" if node is None else f"the result of {node.op_type}"


def describe_attributes(node: ir.Node, other: ir.Node) -> str:
    """Return the first attribute in which two nodes differ."""
    for name in sorted({*node.attributes, *other.attributes}):
        texts = [
            describe_attribute(n.attributes[name]) if name in n.attributes else "left out"
            for n in (node, other)
        ]
        if texts[0] != texts[1]:
            return f"has {name} {texts[0][:40]}, and {texts[1][:40]} belongs there"
    return "has other attributes"
