"""Finds attention in a traced graph, from the keys and values that it reads.

B batch, T tokens of this step, S tokens that are attended to, H query heads, G heads of keys and values,
D head size
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ..errors import ExportError
from .graph import depends_on_shapes, require_producer

MOVES = ("Cast", "Expand", "Reshape", "Transpose", "Unsqueeze")  # they move heads, without arithmetic


@dataclass(frozen=True)
class Attention:
    """One layer's attention in a traced graph.

    Attributes:
        queries: (B, H, T, D), before they are scaled.
        keys, values: this step's (B, G, T, D); over a source (B, G, S, D).
        scale: factor of the scores.
        biases: values added to the scores, masks among them.
        product: MatMul that gives the context (B, H, T, D).
        present: the cache after this step; empty over a source.
    """

    queries: ir.Value
    keys: ir.Value
    values: ir.Value
    scale: float
    biases: tuple[ir.Value, ...]
    product: ir.Node
    present: tuple[ir.Value, ...] = ()


def find_self_attention(graph: ir.Graph, inputs: Mapping[str, ir.Value], layer: int, size: int) -> Attention:
    """Find a layer's attention from the cache that it outputs.

    Args:
        inputs: the graph's, by name: past_key_values.0.key and so on.
        size: D.

    Raises:
        ExportError: the attention has no known form; says where it differs.
    """
    outputs = {str(value.name): value for value in graph.outputs}
    present = []
    new = []
    for kind in ("key", "value"):
        value = outputs[f"present.{layer}.{kind}"]
        concat = require_producer(value)
        if concat.op_type != "Concat" or concat.inputs[0] is not inputs[f"past_key_values.{layer}.{kind}"]:
            raise ExportError(f"{value.name} is no Concat with the past, but {concat.op_type}")
        present.append(value)
        assert concat.inputs[1] is not None
        new.append(concat.inputs[1])
    attention = find_attention_between(present[0], present[1], size)
    if attention is None:
        raise ExportError(f"no Softmax of layer {layer} lies between its keys and values")
    return replace(attention, keys=new[0], values=new[1], present=tuple(present))


def find_source_attention(inputs: Mapping[str, ir.Value], layer: int, size: int) -> Attention:
    """Find a layer's attention over a source from the keys and values that are inputs.

    Args:
        inputs: the graph's, by name: cross.0.key and so on.
    """
    keys, values = (inputs[f"cross.{layer}.{kind}"] for kind in ("key", "value"))
    attention = find_attention_between(keys, values, size)
    if attention is None:
        raise ExportError(f"no Softmax of layer {layer} lies between the source's keys and values")
    return attention


def find_attention_between(keys: ir.Value, values: ir.Value, size: int) -> Attention | None:
    """Return the attention that reads these keys and values, or None if it has no known form."""
    for softmax in find_below(keys, "Softmax"):
        scores, scale, biases = find_product_behind(softmax)
        if scores is None or scores.inputs[0] is None or scores.inputs[1] is None:
            continue
        of_keys = find_scale_between(scores.inputs[1], keys, size)
        if of_keys is None:
            continue
        queries, of_queries = strip_scale(scores.inputs[0], size)
        product = next(iter(find_below(softmax.outputs[0], "MatMul")), None)
        if (
            product is None
            or product.inputs[1] is None
            or find_scale_between(product.inputs[1], values, size) != 1.0
        ):
            return None
        return Attention(queries, keys, values, scale * of_keys * of_queries, tuple(biases), product)
    return None


def find_below(value: ir.Value, operator: str) -> Iterator[ir.Node]:
    """Yield the nearest nodes of an operator among those that depend on a value."""
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


def find_product_behind(softmax: ir.Node) -> tuple[ir.Node | None, float, list[ir.Value]]:
    """Return the MatMul whose scores a Softmax reads, the scale between both, and what is added between."""
    value = softmax.inputs[0]
    scale = 1.0
    biases: list[ir.Value] = []
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "MatMul":
            return node, scale, biases
        if node.op_type in ("Mul", "Div"):
            factor = read_scalar(node.inputs[1])
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
    """Tell whether a value is a MatMul's result, scaled or not."""
    node = value.producer()
    while node is not None and node.op_type in ("Cast", "Div", "Mul") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and node.op_type == "MatMul"


def find_scale_between(value: ir.Value, target: ir.Value, size: int) -> float | None:
    """Return the factor between a cached tensor and a product's input; None if it is another tensor's."""
    scale = 1.0
    while value is not target:
        node = value.producer()
        if node is None or node.inputs[0] is None:
            return None
        if node.op_type in ("Mul", "Div"):
            factor = read_factor(node, size)
            if factor is None:
                return None
            scale *= factor
        elif node.op_type not in MOVES:
            return None
        value = node.inputs[0]
    return scale


def strip_scale(value: ir.Value, size: int) -> tuple[ir.Value, float]:
    """Return queries before they are scaled, and the scale."""
    scale = 1.0
    while (node := value.producer()) is not None and node.op_type in ("Mul", "Div"):
        factor = read_factor(node, size)
        if factor is None or node.inputs[0] is None:
            break
        value = node.inputs[0]
        scale = scale * factor
    return value, scale


def read_factor(node: ir.Node, size: int) -> float | None:
    """Return the number by which a Mul or Div scales its first input, or None."""
    factor = read_scalar(node.inputs[1])
    if factor is None and node.op_type == "Mul" and depends_on_shapes(node.inputs[1]):
        return math.pow(size, -0.25)  # torch spreads 1 / sqrt(D) over both sides of the product
    return factor if factor is None or node.op_type == "Mul" else 1 / factor


def read_scalar(value: ir.Value | None) -> float | None:
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    number = float(value.const_value.numpy().astype(np.float64).reshape(-1)[0])
    return number if math.isfinite(number) and number else None
