"""Finds attention in a traced graph, from the keys and values that it reads.

B batch, T tokens of this step, S tokens that are attended to, H query heads, G heads of keys and values,
D head size
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ..errors import ExportError
from ..passes.neighbours import find_below
from .graph import Heads, depends_on_shapes, require_producer

MOVES = ("Cast", "Expand", "Reshape", "Transpose", "Unsqueeze")  # they move heads, without arithmetic
BETWEEN_PRODUCT_AND_MASK = ("Cast", "Div", "Mul", "Tanh")


@dataclass(frozen=True)
class Attention:
    """One layer's attention in a traced graph."""

    queries: ir.Value  # (B, H, T, D), before they are scaled
    keys: ir.Value  # this step's (B, G, T, D); over a source (B, G, S, D)
    values: ir.Value  # likewise
    scale: float  # of the scores
    biases: tuple[ir.Value, ...]  # added to the scores, masks among them
    product: ir.Node  # the MatMul that gives the context (B, H, T, D)
    past: tuple[ir.Value, ...] = ()  # the cache before this step; empty over a source
    present: tuple[ir.Value, ...] = ()  # and after it
    softcap: float | None = None  # c in c * tanh(scores / c), before masks are added


@dataclass(frozen=True)
class Scores:
    """The steps between a Softmax and the product whose scores it reads."""

    product: ir.Node  # the MatMul of queries and keys
    scale: float
    biases: tuple[ir.Value, ...]
    softcap: float | None


def find_self_attentions(graph: ir.Graph, heads: Heads) -> list[Attention]:
    """Find each layer's attention from the cache that it outputs, or raise ExportError."""
    by_name = {str(value.name): value for value in (*graph.inputs, *graph.outputs)}
    found = []
    for layer in range(heads.layers):
        past = tuple(by_name[f"past_key_values.{layer}.{kind}"] for kind in ("key", "value"))
        present = tuple(by_name[f"present.{layer}.{kind}"] for kind in ("key", "value"))
        new = []
        for old, value in zip(past, present, strict=True):
            concat = require_producer(value)
            if concat.op_type != "Concat" or concat.inputs[0] is not old:
                raise ExportError(f"{value.name} comes from {concat.op_type}, not a Concat with the past")
            assert concat.inputs[1] is not None
            new.append(concat.inputs[1])
        attention = find_attention_between(present[0], present[1], heads.size, f"layer {layer}", "its")
        found.append(replace(attention, keys=new[0], values=new[1], past=past, present=present))
    return found


def find_source_attentions(graph: ir.Graph, heads: Heads) -> list[Attention]:
    """Find each layer's attention over a source, whose keys and values are inputs, or raise ExportError."""
    inputs = {str(value.name): value for value in graph.inputs}
    found = []
    for layer in range(heads.layers):
        keys, values = (inputs[f"cross.{layer}.{kind}"] for kind in ("key", "value"))
        found.append(find_attention_between(keys, values, heads.size, f"layer {layer}", "the source's"))
    return found


def find_attention_between(keys: ir.Value, values: ir.Value, size: int, where: str, whose: str) -> Attention:
    """Return the attention that reads these keys and values, or raise ExportError if it has no known form."""
    for softmax in find_below(keys, "Softmax"):
        found = find_product_behind(softmax)
        if found is None:
            continue
        read, read_too = found.product.inputs
        assert read is not None and read_too is not None
        of_keys = find_scale_between(read_too, keys, size)
        if of_keys is None:
            continue
        queries, of_queries = strip_scale(read, size)
        product = next(iter(find_below(softmax.outputs[0], "MatMul")), None)
        if product is None or find_scale_between(product.inputs[1], values, size) != 1.0:
            break
        scale = found.scale * of_keys * of_queries
        return Attention(queries, keys, values, scale, found.biases, product, softcap=found.softcap)
    raise ExportError(f"no Softmax of {where} lies between {whose} keys and values")


def find_product_behind(softmax: ir.Node) -> Scores | None:
    """Return the MatMul whose scores a Softmax reads, and the steps between them."""
    value = softmax.inputs[0]
    scale = 1.0
    softcap = None
    biases: list[ir.Value] = []
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "MatMul":
            # softcap * tanh(x * scale) is softcap * tanh(x * scale * softcap / softcap)
            return Scores(node, scale * (softcap or 1.0), tuple(biases), softcap)
        if node.op_type in ("Mul", "Div"):
            factor = read_scalar(node.inputs[1])
            if factor is None:
                return None
            scale = scale * factor if node.op_type == "Mul" else scale / factor
            value = node.inputs[0]
        elif node.op_type == "Tanh" and softcap is None:
            softcap = scale
            scale = 1.0
            value = node.inputs[0]
        elif node.op_type == "Add" and softcap is None:  # a mask
            value = next((v for v in node.inputs if v is not None and is_product(v)), None)
            biases += [v for v in node.inputs if v is not None and v is not value]
        elif node.op_type in ("Cast", "Where"):
            value = node.inputs[1 if node.op_type == "Where" else 0]
        else:
            return None
    return None


def is_product(value: ir.Value) -> bool:
    """Tell whether a value is a MatMul's result, scaled and capped or not, to which a bias may be added."""
    node = value.producer()
    while node is not None and node.op_type in BETWEEN_PRODUCT_AND_MASK and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.op_type != "Add":
        return node is not None and node.op_type == "MatMul"
    return any(v is not None and is_product(v) for v in node.inputs)


def find_scale_between(value: ir.Value | None, target: ir.Value, size: int) -> float | None:
    """Return the factor between a cached tensor and a product's input; None if it is another tensor's."""
    scale = 1.0
    while value is not target:
        node = None if value is None else value.producer()
        if node is None:
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
