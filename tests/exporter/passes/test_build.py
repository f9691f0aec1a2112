"""Nodes that passes add to a graph: their names and types."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir

from planforge.exporter.passes.build import Builder

TEXT = """
<ir_version: 10, opset_import: ["" : 20]>
doubled (float[n] x) => (float[n] y) { [op_neg_1] a = Neg (x) [twice] y = Add (x, x) }
"""


def test_added_nodes_have_names_of_their_own_and_the_types_that_are_known() -> None:
    graph = ir.from_proto(onnx.parser.parse_model(TEXT)).graph
    x = graph.inputs[0]
    op = Builder(graph, graph[1], "op")
    added = [op.add("Erf", x), op.add("Erf", x)]
    graph.remove(graph[0])  # as many nodes as before: a name by their number would come again
    added += [op.add("Erf", x), Builder(graph, None, "op").add("Erf", x)]
    names = [node.name for node in graph]
    assert len(set(names)) == len(names) == 5
    assert [node.outputs[0].type for node in added] == [None] * 4  # Erf is in no table
    floats = ir.TensorType(ir.DataType.FLOAT)
    assert op("Mul", x, 2.0).type == op("Where", op("Cast", x, to=9), 1.0, x).type == floats
    assert op("Shape", x).type == ir.TensorType(ir.DataType.INT64)
