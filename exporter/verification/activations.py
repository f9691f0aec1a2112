"""Tells the kinds of activations in a graph, and whether they are the model's."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from ..tracing.modules import find_module
from .attributes import describe_node, read_number
from .meant import Meant

# What the kinds are called in words.
NAMES = {"gelu": "the exact GELU", "gelu_tanh": "GELU by tanh", "quick_gelu": "GELU by sigmoid"}
ALPHAS = {1.0: "silu", 1.702: "quick_gelu"}  # of x * sigmoid(alpha * x)
OPERATORS = {
    "BiasGelu": "gelu",
    "Elu": "elu",
    "Erf": "gelu",
    "FastGelu": "gelu_tanh",
    "HardSwish": "hardswish",
    "LeakyRelu": "leaky_relu",
    "Mish": "mish",
    "Relu": "relu",
    "Selu": "selu",
    "Softplus": "softplus",
    "Swish": "silu",
}
ROOT = math.sqrt(2 / math.pi)  # what GELU by tanh multiplies by
BEHIND = 4  # nodes between that product and its tanh


def find_wrong_activations(graph: ir.Graph, meant: Meant) -> Iterator[str]:
    """Yield the activations that are not of the kind that the model has there."""
    for node in graph:
        kind = find_activation(node)
        if kind is None:
            continue
        allowed = meant.find_activations(find_module(node))
        if allowed and kind not in allowed:
            whose = " or ".join(NAMES.get(x, x) for x in sorted(allowed))
            yield f"{describe_node(node)} computes {NAMES.get(kind, kind)}, the model's is {whose}"


def find_activation(node: ir.Node) -> str | None:
    """Return the kind of activation that a node computes, or is the heart of; None for other nodes."""
    if node.op_type in OPERATORS:
        return OPERATORS[node.op_type]
    if node.op_type == "Gelu":
        return "gelu_tanh" if node.attributes.get_string("approximate", "none") == "tanh" else "gelu"
    if node.op_type == "QuickGelu":
        return name_alpha(node.attributes.get_float("alpha", 1.702))
    if node.op_type == "Sigmoid":
        return find_swish(node)
    if node.op_type == "Tanh":
        return "gelu_tanh" if multiplies_by_root(node) else "tanh"
    return None


def name_alpha(alpha: float) -> str:
    return next(
        (kind for x, kind in ALPHAS.items() if math.isclose(alpha, x, rel_tol=1e-3)),
        f"x * sigmoid({alpha:g} x)",
    )


def find_swish(sigmoid: ir.Node) -> str:
    """Return the kind of x * sigmoid(alpha * x), or "sigmoid" where nothing is multiplied by it like that."""
    read = sigmoid.inputs[0]
    product = None if read is None else read.producer()
    factors = [] if product is None or product.op_type != "Mul" else [read_number(x) for x in product.inputs]
    alpha = next((x for x in factors if x is not None), None)
    sources = {read} if product is None or alpha is None else {read, *product.inputs}
    for reader, _ in sigmoid.outputs[0].uses():
        if reader.op_type == "Mul":
            other = next((x for x in reader.inputs if x is not sigmoid.outputs[0]), None)
            if other is read:
                return "silu"
            if other in sources:
                return name_alpha(alpha or 1.0)
    return "sigmoid"


def multiplies_by_root(tanh: ir.Node) -> bool:
    """Tell whether what a Tanh reads was multiplied by sqrt(2 / pi) a few nodes before."""
    waiting = [tanh]
    for _ in range(BEHIND):
        values = [value for node in waiting for value in node.inputs if value is not None]
        numbers = [read_number(value) for value in values]
        if any(x is not None and math.isclose(x, ROOT, rel_tol=1e-3) for x in numbers):
            return True
        waiting = [node for value in values if (node := value.producer()) is not None]
    return False
