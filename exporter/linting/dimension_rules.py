"""Rules about axes that have the same name and cannot be equal.

An axis is a sum: its names and how often, and a number. "past" + "tokens" + 1 is {"past": 1, "tokens": 1,
"": 1}. What is not known is a name of its own, so that nothing is concluded of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import onnx_ir as ir

from ..targets import Target
from .model import LintModel, dims_of, is_standard, read_attribute
from .operator_tables import split_words
from .rule import Hit, accept_all, make_rule

Axis = Counter[str]
Shape = list[Axis]

# Operators whose output has the shape of their first input.
KEEPING = split_words(
    "Cast DequantizeLinear Dropout Erf Exp Gelu Identity LayerNormalization Neg QuantizeLinear"
    " RMSNormalization Relu Sigmoid Softmax Sqrt Tanh"
)
BROADCASTING = split_words("Add And Div Equal Greater Less Max Min Mul Or Pow Sub Where")


def read_declared(value: ir.Value | None) -> Shape | None:
    """Return the shape that the file, or onnx's inference, declares; None if its rank is unknown."""
    dims = dims_of(value)
    if value is None or dims is None:
        return None
    # A name of an output is what the exporter believed; one of an input is what a caller must heed.
    believed = value.producer() is not None
    shape: Shape = []
    for i, dim in enumerate(dims):
        if isinstance(dim, int):
            shape.append(Counter({"": dim}))
        elif believed or not dim:
            shape.append(Counter({f"?{id(value)}.{i}": 1}))
        else:
            shape.append(Counter({dim: 1}))
    return shape


def compute_shape(node: ir.Node, shapes: Sequence[Shape | None]) -> Shape | None:
    """Return the shape that a node makes of its inputs' shapes, with sums for the axes that Concat makes."""
    known = [shape for shape in shapes if shape is not None]
    if not is_standard(node) or not known or len(known) < len(shapes):
        return None
    first = known[0]
    if node.op_type in KEEPING:
        return first
    if node.op_type == "Concat":
        return join(known, read_attribute(node, "axis"))
    if node.op_type == "Transpose":
        order = read_attribute(node, "perm", list(reversed(range(len(first)))))
        return [first[i] for i in order] if is_permutation(order, len(first)) else None
    if node.op_type in BROADCASTING:
        return broadcast(known)
    if node.op_type == "MatMul" and len(known) == 2 and min(map(len, known)) >= 2:
        batch = broadcast([known[0][:-2], known[1][:-2]])
        return [*batch, known[0][-2], known[1][-1]]
    return None


def is_permutation(order: object, rank: int) -> TypeGuard[Sequence[int]]:
    """Tell whether an attribute names each of so many axes once; a damaged node's may be anything."""
    return isinstance(order, list | tuple) and set(order) == set(range(rank)) and len(order) == rank


def join(shapes: Sequence[Shape], axis: object) -> Shape | None:
    ranks = {len(shape) for shape in shapes}
    if not isinstance(axis, int) or len(ranks) != 1 or axis not in range(-max(ranks), max(ranks)):
        return None
    result = list(shapes[0])
    total: Axis = Counter()
    for shape in shapes:
        total.update(shape[axis])
    result[axis] = total
    return result


def broadcast(shapes: Sequence[Shape]) -> Shape:
    rank = max(len(shape) for shape in shapes)
    result = []
    for place in range(-rank, 0):
        axes = [shape[place] for shape in shapes if len(shape) >= -place]
        axes = [axis for axis in axes if axis != Counter({"": 1})] or axes
        # A sum says more than a name that it must equal; what nothing is known of says least.
        result.append(max(axes, key=lambda axis: (not is_unknown(axis), len(axis))))
    return result


def is_unknown(axis: Axis) -> bool:
    return len(axis) == 1 and next(iter(axis)).startswith("?")


def never_equal(a: Axis, b: Axis) -> bool:
    """Tell whether one axis is the other plus something, so that they are equal only if that is 0."""
    rest = Counter(a)
    rest.subtract(b)
    signs = {count > 0 for count in rest.values() if count}
    named = any(text and not text.startswith("?") for text in a.keys() & b.keys())
    return len(signs) == 1 and named


def find_clashes(node: ir.Node, shapes: Sequence[Shape | None]) -> Iterator[tuple[Axis, Axis]]:
    """Yield pairs of axes that a node needs to be equal and that never are."""
    known = [shape for shape in shapes if shape is not None]
    pairs: list[tuple[Axis, Axis]] = []
    if len(known) < len(shapes) or len(known) < 2:
        return
    if node.op_type in BROADCASTING:
        for other in known[1:]:
            pairs += zip(reversed(known[0]), reversed(other), strict=False)
    elif node.op_type == "MatMul" and len(known) == 2 and min(map(len, known)) >= 2:
        pairs.append((known[0][-1], known[1][-2]))
    elif node.op_type == "Concat":
        axis = read_attribute(node, "axis")
        if isinstance(axis, int) and len({len(shape) for shape in known}) == 1:
            joint = axis % len(known[0])
            for other in known[1:]:
                pairs += [pair for i, pair in enumerate(zip(known[0], other, strict=True)) if i != joint]
    elif node.op_type == "Attention" and [len(shape) for shape in known[:3]] == [4, 4, 4]:
        pairs.append((known[1][2], known[2][2]))
        if len(known) == 4 and known[3]:
            pairs.append((known[1][2], known[3][-1]))
    yield from ((a, b) for a, b in pairs if never_equal(a, b))


def describe_axis(axis: Axis) -> str:
    named = {text: count for text, count in axis.items() if text and not text.startswith("?")}
    parts = [text if count == 1 else f"{count} {text}" for text, count in named.items()]
    if any(text.startswith("?") for text in axis):
        parts.append("something")
    if axis[""]:
        parts.append(str(axis[""]))
    return " + ".join(parts)


@make_rule(
    "axes of inputs that have one name and cannot be equal",
    fix="give each length of its own a name of its own, as past, tokens and total",
    source="measured with tensorrt_rtx 1.7.1.116 and onnxruntime 1.31.1",
    holds=accept_all,
    alike=True,
)
def check_dimension_name(model: LintModel, target: Target) -> Iterator[Hit]:
    known: dict[ir.Value | None, Shape | None] = {}
    for node in model.model.graph:
        for value in node.inputs:
            known.setdefault(value, read_declared(value))
        for a, b in find_clashes(node, [known[v] for v in node.inputs if v is not None and v.name]):
            what = f"needs {describe_axis(a)} and {describe_axis(b)} to be equal, and they never are"
            # ONNX Runtime looks at the lengths, not at their names.
            yield Hit(what, node, severity=None if target.plans else "warning")
            break
        shape = compute_shape(node, [known[value] for value in node.inputs])
        if shape is not None and node.outputs:
            known[node.outputs[0]] = shape
