"""Finds in a graph what chooses the experts of a mixture: small errors there change which are computed."""

from __future__ import annotations

import onnx_ir as ir


def chooses_experts(product: ir.Node) -> bool:
    """Tell whether the largest results of a product choose experts."""
    return any(
        softmax.op_type == "Softmax"
        and any(reader.op_type == "TopK" for reader in list_readers(softmax.outputs[0]))
        for softmax in list_readers(product.outputs[0])
    )


def find_routers(graph: ir.Graph) -> set[ir.Node]:
    """Return the products that choose experts, and the nodes behind them that compute with the shares.

    Two shares that fp16 cannot tell apart would choose by their numbers instead.
    """
    found: set[ir.Node] = set()
    for product in (node for node in graph if chooses_experts(node)):
        found.add(product)
        waiting = [node for node in list_readers(product.outputs[0]) if node.op_type == "Softmax"]
        while waiting:
            node = waiting.pop()
            found.add(node)
            if node.op_type in ("Softmax", "TopK"):
                waiting += list_readers(node.outputs[0])
    return found


def list_readers(value: ir.Value) -> list[ir.Node]:
    return [node for node, _ in value.uses()]
