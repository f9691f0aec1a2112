"""An imported decoder's attention over its growing cache -> ONNX Runtime's own over shared buffers.

B batch, T tokens of this step, H query heads, G heads of keys and values, D head size
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ..errors import ExportError
from ..passes.weights import MICROSOFT, initializer
from .decoder_graph import Heads, producer_of

MOVES = ("Cast", "Expand", "Reshape", "Transpose", "Unsqueeze")  # of heads, without arithmetic
OF_SHAPES = ("Cast", "Div", "Gather", "Reshape", "Slice", "Sqrt", "Squeeze")


@dataclass(frozen=True)
class Attention:
    """One layer's attention as a traced graph spells it.

    Attributes:
        queries: (B, H, T, D), before they are scaled.
        keys, values: of this step (B, G, T, D).
        scale: of the scores.
        product: that gives the context (B, H, T, D).
        present: its outputs.
    """

    queries: ir.Value
    keys: ir.Value
    values: ir.Value
    scale: float
    product: ir.Node
    present: tuple[ir.Value, ir.Value]


def share_buffers(model: ir.Model, heads: Heads, queries: int) -> None:
    """Replaces each layer's Concat with the past and its attention by GroupQueryAttention.

    What is causal is known to it: the mask goes. Any other mask, such as a window, is lost: what verification
    finds. Positions follow from the lengths of the past.

    Args:
        queries: H.

    Raises:
        ExportError: a layer's attention is not of the form that is known; says where it ends.
    """
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    found = [attention_of(graph, inputs, layer, heads.size) for layer in range(heads.layers)]
    last, total, positions = lengths(graph, inputs["input_ids"])
    if "position_ids" in inputs:
        ir.convenience.replace_all_uses_with(inputs["position_ids"], positions)
    for layer, attention in enumerate(found):
        past = [inputs[f"past_key_values.{layer}.{kind}"] for kind in ("key", "value")]
        write_attention(graph, attention, past, (last, total), heads, queries)
    model.opset_imports.setdefault(MICROSOFT, 1)
    common.RemoveUnusedNodesPass()(model)
    for name in ("attention_mask", "position_ids"):
        if name in inputs and inputs[name].uses():
            raise ExportError(f"{name} is used outside of attention")
        if name in inputs:
            graph.inputs.remove(inputs[name])


def lengths(graph: ir.Graph, ids: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Each row's last slot (B,) and the total () as GroupQueryAttention wants them, and positions (B, T)."""
    past = ir.Value(name="past_lengths", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(["batch"]))
    graph.inputs.append(past)
    first = graph[0]

    def add(operator: str, *values: ir.Value, **attributes: int) -> ir.Value:
        node = ir.node(operator, values, attributes)
        graph.insert_before(first, node)
        node.outputs[0].name = f"lengths/{len(made)}"
        made.append(node)
        return node.outputs[0]

    def number(name: str, array: np.ndarray) -> ir.Value:
        return initializer(graph, f"lengths/{name}", ir.tensor(array))

    made: list[ir.Node] = []
    one, axes = number("one", np.array([1], np.int32)), number("axis", np.array([0], np.int64))
    tokens = add("Shape", ids, start=1, end=2)  # (1,)
    counted = add("Cast", tokens, to=ir.DataType.INT32)
    last = add("Sub", add("Add", past, counted), one)
    total = add("Add", add("ReduceMax", past, axes, keepdims=0), add("Squeeze", counted, axes))
    zero, step = number("zero", np.array(0, np.int64)), number("step", np.array(1, np.int64))
    offsets = add("Range", zero, add("Squeeze", tokens, axes), step)
    column = add("Unsqueeze", past, number("column", np.array([1], np.int64)))
    return last, total, add("Add", add("Cast", column, to=ir.DataType.INT64), offsets)


def write_attention(
    graph: ir.Graph,
    attention: Attention,
    past: list[ir.Value],
    last_and_total: tuple[ir.Value, ir.Value],
    heads: Heads,
    count: int,
) -> None:
    """One GroupQueryAttention in the place of a layer's attention."""
    where, dtype = attention.product, attention.queries.type

    def insert(node: ir.Node) -> ir.Value:
        graph.insert_before(where, node)
        node.outputs[0].type = dtype
        return node.outputs[0]

    def joined(x: ir.Value, of: int) -> ir.Value:  # (B, h, T, D) -> (B, T, h * D)
        moved = insert(ir.node("Transpose", [x], {"perm": [0, 2, 1, 3]}))
        shape = initializer(graph, f"joined/{of}", ir.tensor(np.array([0, 0, of * heads.size], np.int64)))
        return insert(ir.node("Reshape", [moved, shape]))

    together = (
        joined(attention.queries, count),
        joined(attention.keys, heads.cached),
        joined(attention.values, heads.cached),
    )
    node = ir.node(
        "GroupQueryAttention",
        [*together, *past, *last_and_total],
        {"num_heads": count, "kv_num_heads": heads.cached, "scale": attention.scale},
        domain=MICROSOFT,
        num_outputs=3,
    )
    context = insert(node)
    apart = initializer(graph, f"apart/{count}", ir.tensor(np.array([0, 0, count, heads.size], np.int64)))
    spread = insert(ir.node("Reshape", [context, apart]))
    moved = insert(ir.node("Transpose", [spread], {"perm": [0, 2, 1, 3]}))
    ir.convenience.replace_all_uses_with(where.outputs[0], moved)
    for old, new in zip(attention.present, node.outputs[1:], strict=True):
        new.name, new.type = old.name, old.type
        old.name = f"{old.name}/grown"
        graph.outputs[list(graph.outputs).index(old)] = new


def attention_of(graph: ir.Graph, inputs: Mapping[str, ir.Value], layer: int, size: int) -> Attention:
    """A layer's attention, found from what its cache becomes."""
    outputs = {str(value.name): value for value in graph.outputs}
    present, new = [], []
    for kind in ("key", "value"):
        value = outputs[f"present.{layer}.{kind}"]
        concat = producer_of(value)
        if concat.op_type != "Concat" or concat.inputs[0] is not inputs[f"past_key_values.{layer}.{kind}"]:
            raise ExportError(f"{value.name} is no Concat with the past, but {concat.op_type}")
        present.append(value)
        assert concat.inputs[1] is not None
        new.append(concat.inputs[1])
    for softmax in below(present[0], "Softmax"):
        scores, scale = product_behind(softmax)
        if scores is None or scores.inputs[0] is None or scores.inputs[1] is None:
            continue
        of_keys = scale_to(scores.inputs[1], present[0], size)
        if of_keys is None:
            continue
        queries, of_queries = unscaled(scores.inputs[0], size)
        product = next(iter(below(softmax.outputs[0], "MatMul")), None)
        if product is None or product.inputs[1] is None:
            break
        if scale_to(product.inputs[1], present[1], size) != 1.0:
            break
        return Attention(
            queries, new[0], new[1], scale * of_keys * of_queries, product, (present[0], present[1])
        )
    raise ExportError(f"no Softmax of layer {layer} lies between its keys and values")


def below(value: ir.Value, operator: str) -> Iterator[ir.Node]:
    """The nearest nodes of an operator among those that read a value, however far on."""
    waiting, seen = [value], set()
    while waiting:
        for node, _ in waiting.pop(0).uses():
            if id(node) in seen or node.op_type == "Shape":
                continue
            seen.add(id(node))
            if node.op_type == operator:
                yield node
            else:
                waiting += node.outputs


def product_behind(softmax: ir.Node) -> tuple[ir.Node | None, float]:
    """The MatMul whose scores a Softmax sees, through masks, and the scale between both."""
    value, scale = softmax.inputs[0], 1.0
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "MatMul":
            return node, scale
        if node.op_type in ("Mul", "Div"):
            factor = constant_of(node.inputs[1])
            if factor is None:
                return None, scale
            scale = scale * factor if node.op_type == "Mul" else scale / factor
            value = node.inputs[0]
        elif node.op_type == "Add":  # a mask
            value = next((v for v in node.inputs if v is not None and is_product(v)), None)
        elif node.op_type in ("Cast", "Where"):
            value = node.inputs[1 if node.op_type == "Where" else 0]
        else:
            return None, scale
    return None, scale


def is_product(value: ir.Value) -> bool:
    """Whether a value is a MatMul's, scaled or not."""
    node = value.producer()
    while node is not None and node.op_type in ("Cast", "Div", "Mul") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and node.op_type == "MatMul"


def scale_to(value: ir.Value, target: ir.Value, size: int) -> float | None:
    """The factor between a cached tensor and what a product reads; None if it reads something else."""
    scale = 1.0
    while value is not target:
        node = value.producer()
        if node is None or node.inputs[0] is None:
            return None
        if node.op_type in ("Mul", "Div"):
            factor = factor_of(node, size)
            if factor is None:
                return None
            scale *= factor
        elif node.op_type not in MOVES:
            return None
        value = node.inputs[0]
    return scale


def unscaled(value: ir.Value, size: int) -> tuple[ir.Value, float]:
    """Queries before their scale, and it."""
    scale = 1.0
    while (node := value.producer()) is not None and node.op_type in ("Mul", "Div"):
        factor = factor_of(node, size)
        if factor is None or node.inputs[0] is None:
            break
        value, scale = node.inputs[0], scale * factor
    return value, scale


def factor_of(node: ir.Node, size: int) -> float | None:
    """What a Mul or Div does to its first input, if that is one number."""
    factor = constant_of(node.inputs[1])
    if factor is None and node.op_type == "Mul" and depends_on_shapes_alone(node.inputs[1]):
        return math.pow(size, -0.25)  # torch spreads 1 / sqrt(D) over both sides of the product
    return factor if factor is None or node.op_type == "Mul" else 1 / factor


def depends_on_shapes_alone(value: ir.Value | None) -> bool:
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Shape":
            return True
        given = [v for v in node.inputs if v is not None and v.const_value is None]
        value = given[0] if node.op_type in OF_SHAPES and len(given) == 1 else None
    return False


def constant_of(value: ir.Value | None) -> float | None:
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    number = float(value.const_value.numpy().astype(np.float64).reshape(-1)[0])
    return number if math.isfinite(number) and number else None
