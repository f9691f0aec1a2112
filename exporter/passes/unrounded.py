"""Graphs without the rounding of activations that somebody else put into them, to compare what is left.

fp32's last bit moves a rounded activation by a whole step, so the results of two right graphs differ. With
the values themselves in the codes' place they do not. Which numbers round which value is compared apart, bit
for bit: see `verification.foreign_quantization`.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .build import replace_value
from .quantization_form import DEQUANTIZES, KEPT, QUANTIZES


def list_rounding(model: ir.Model) -> list[ir.Node]:
    """Return somebody else's nodes that quantize what the graph computes, those of branches too."""
    return [node for graph in model.graphs() for node in graph if rounds_activation(node)]


def rounds_activation(node: ir.Node) -> bool:
    """Tell whether a node of somebody else's quantizes what the graph computes, and no constant."""
    if node.op_type != QUANTIZES or KEPT not in node.metadata_props:
        return False
    data = node.inputs[0]
    return data is not None and ir.convenience.get_const_tensor(data) is None


def skip_rounding(model: ir.Model) -> bool:
    """Let values that are rounded pass as they are; return whether there are any.

    A QuantizeLinear's readers are DequantizeLinear alone, as imports are checked for.
    """
    found = list_rounding(model)
    for node in found:
        for use in list(node.outputs[0].uses()):
            if use.node.op_type == DEQUANTIZES and use.node.graph is not None:
                pass_on(use.node, node.inputs[0])
    RemoveUnusedNodesPass()(model)
    return bool(found)


def pass_on(dequantize: ir.Node, value: ir.Value | None) -> None:
    """Replace a node by an Identity of a value."""
    graph = dequantize.graph
    assert isinstance(graph, ir.Graph)
    identity = ir.node("Identity", [value], name=dequantize.name)
    identity.metadata_props.update(dequantize.metadata_props)
    graph.insert_before(dequantize, identity)
    replace_value(dequantize.outputs[0], identity.outputs[0])
    graph.remove(dequantize, safe=True)
