"""How a traced graph spells attention, found from the keys and values that it reads.

B batch, T tokens of this step, S tokens that are looked at, H query heads, G heads of keys and values,
D head size
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..errors import ExportError
from .graph import depends_on_shapes, producer_of

MOVES = ("Cast", "Expand", "Reshape", "Transpose", "Unsqueeze")  # of heads, without arithmetic


@dataclass(frozen=True)
class Attention:
    """One layer's attention as a traced graph spells it.

    Attributes:
        queries: (B, H, T, D), before they are scaled.
        keys, values: of this step (B, G, T, D); over a source (B, G, S, D).
        scale: of the scores.
        biases: what is added to the scores, masks among it.
        product: that gives the context (B, H, T, D).
        present: what becomes of the cache; empty over a source.
    """

    queries: ir.Value
    keys: ir.Value
    values: ir.Value
    scale: float
    biases: tuple[ir.Value, ...]
    product: ir.Node
    present: tuple[ir.Value, ...] = ()


def self_attention(graph: ir.Graph, inputs: Mapping[str, ir.Value], layer: int, size: int) -> Attention:
    """A layer's attention, found from what its cache becomes.

    Args:
        inputs: of the graph, by name: past_key_values.0.key and so on.
        size: D.

    Raises:
        ExportError: it is not of the form that is known; says where it ends.
    """
    outputs = {str(value.name): value for value in graph.outputs}
    present = []
    new = []
    for kind in ("key", "value"):
        value = outputs[f"present.{layer}.{kind}"]
        concat = producer_of(value)
        if concat.op_type != "Concat" or concat.inputs[0] is not inputs[f"past_key_values.{layer}.{kind}"]:
            raise ExportError(f"{value.name} is no Concat with the past, but {concat.op_type}")
        present.append(value)
        assert concat.inputs[1] is not None
        new.append(concat.inputs[1])
    found = between(present[0], present[1], size)
    if found is None:
        raise ExportError(f"no Softmax of layer {layer} lies between its keys and values")
    queries, scale, biases, product = found
    return Attention(queries, new[0], new[1], scale, biases, product, tuple(present))


def source_attention(inputs: Mapping[str, ir.Value], layer: int, size: int) -> Attention:
    """A layer's attention over a source, found from the keys and values that are inputs.

    Args:
        inputs: of the graph, by name: cross.0.key and so on.
    """
    keys, values = (inputs[f"cross.{layer}.{kind}"] for kind in ("key", "value"))
    found = between(keys, values, size)
    if found is None:
        raise ExportError(f"no Softmax of layer {layer} lies between the source's keys and values")
    queries, scale, biases, product = found
    return Attention(queries, keys, values, scale, biases, product)


def between(
    keys: ir.Value, values: ir.Value, size: int
) -> tuple[ir.Value, float, tuple[ir.Value, ...], ir.Node] | None:
    """Queries, scale, biases and last product of the attention that reads keys and values."""
    for softmax in below(keys, "Softmax"):
        scores, scale, biases = product_behind(softmax)
        if scores is None or scores.inputs[0] is None or scores.inputs[1] is None:
            continue
        of_keys = scale_to(scores.inputs[1], keys, size)
        if of_keys is None:
            continue
        queries, of_queries = unscaled(scores.inputs[0], size)
        product = next(iter(below(softmax.outputs[0], "MatMul")), None)
        if product is None or product.inputs[1] is None or scale_to(product.inputs[1], values, size) != 1.0:
            return None
        return queries, scale * of_keys * of_queries, tuple(biases), product
    return None


def below(value: ir.Value, operator: str) -> Iterator[ir.Node]:
    """The nearest nodes of an operator among those that read a value, however far on."""
    waiting = [value]
    seen = set()
    while waiting:
        for node, _ in waiting.pop(0).uses():
            if id(node) in seen or node.op_type == "Shape":
                continue
            seen.add(id(node))
            if node.op_type == operator:
                yield node
            else:
                waiting += node.outputs


def product_behind(softmax: ir.Node) -> tuple[ir.Node | None, float, list[ir.Value]]:
    """The MatMul whose scores a Softmax sees, the scale between both, and what is added on the way."""
    value = softmax.inputs[0]
    scale = 1.0
    biases: list[ir.Value] = []
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "MatMul":
            return node, scale, biases
        if node.op_type in ("Mul", "Div"):
            factor = constant_of(node.inputs[1])
            if factor is None:
                return None, scale, biases
            scale = scale * factor if node.op_type == "Mul" else scale / factor
            value = node.inputs[0]
        elif node.op_type == "Add":  # a mask
            value = next((v for v in node.inputs if v is not None and is_product(v)), None)
            biases += [v for v in node.inputs if v is not None and v is not value]
        elif node.op_type in ("Cast", "Where"):
            value = node.inputs[1 if node.op_type == "Where" else 0]
        else:
            return None, scale, biases
    return None, scale, biases


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
        value = node.inputs[0]
        scale = scale * factor
    return value, scale


def factor_of(node: ir.Node, size: int) -> float | None:
    """What a Mul or Div does to its first input, if that is one number."""
    factor = constant_of(node.inputs[1])
    if factor is None and node.op_type == "Mul" and depends_on_shapes(node.inputs[1]):
        return math.pow(size, -0.25)  # torch spreads 1 / sqrt(D) over both sides of the product
    return factor if factor is None or node.op_type == "Mul" else 1 / factor


def constant_of(value: ir.Value | None) -> float | None:
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    number = float(value.const_value.numpy().astype(np.float64).reshape(-1)[0])
    return number if math.isfinite(number) and number else None
