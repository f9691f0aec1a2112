"""Finds the biases of products, so that the product's own node can add them."""

from __future__ import annotations

import onnx_ir as ir

from .build import Builder, replace_value
from .neighbours import find_only_reader
from .weights import MICROSOFT

# Operators that add a bias and compute a GELU, with those that compute the same GELU of one input.
GELUS = {"BiasGelu": "Gelu", "FastGelu": "FastGelu"}


def find_bias_add(matmul: ir.Node) -> ir.Node | None:
    """Return the Add of a constant vector, as wide as the product, that is its only reader; else None."""
    product = matmul.outputs[0]
    add = find_only_reader(product, ["Add"])
    if add is None or len(matmul.inputs) > 2:
        return None
    vector = find_vector(add)
    wide = vector is not None and product.shape is not None and vector.shape == product.shape[-1:]
    return add if wide else None


def find_vector(add: ir.Node) -> ir.Value | None:
    """Return the constant vector that an Add adds, or None."""
    constants = [v for v in add.inputs if v is not None and v.const_value is not None]
    return next((v for v in constants if v.const_value is not None and len(v.const_value.shape) == 1), None)


def split_bias_gelus(graph: ir.Graph) -> None:
    """Write each GELU with a bias as Add and GELU: a product may add the bias, and GELU is faster then."""
    op = Builder(graph, None, "unbiased")
    for node in list(graph):
        if node.op_type in GELUS and len(node.inputs) == 2:
            op.before = node
            result = op(GELUS[node.op_type], op("Add", *node.inputs), domain=MICROSOFT)
            replace_value(node.outputs[0], result)
            graph.remove(node, safe=True)
