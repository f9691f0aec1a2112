"""Replaces operators that ONNX Runtime has for a CPU and its builds for browsers lack.

B batch, T tokens, V vocabulary, E width, S numbers of a block
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..errors import ExportError
from ..passes.build import Builder
from .graphs import PREFIX

ZERO = 128  # of uint8, where no zero point is given


def spell_out_tables(graph: ir.Graph) -> None:
    """Compute every GatherBlockQuantized by operators of ONNX: gather bytes and scales, then multiply."""
    for node in [node for node in graph if node.op_type == "GatherBlockQuantized"]:
        options = {name: attribute.as_int() for name, attribute in node.attributes.items()}
        table, ids, scales = node.inputs[:3]
        if options != options | {"bits": 8, "gather_axis": 0, "quantize_axis": 1} or len(node.inputs) > 3:
            raise ExportError(f"node {node.name!r} reads an embedding in an unsupported format: {options}")
        assert table is not None and table.shape is not None
        width = table.shape[1]
        add = Builder(graph, node, PREFIX)
        numbers = add("Cast", add("Gather", table, ids, axis=0), to=ir.DataType.FLOAT)  # (B, T, E)
        blocks = add("Reshape", numbers, np.array([0, 0, -1, options["block_size"]]))  # (B, T, E / S, S)
        steps = add("Unsqueeze", add("Gather", scales, ids, axis=0), np.array([-1]))  # (B, T, E / S, 1)
        values = add("Mul", add("Sub", blocks, np.float32(ZERO)), steps)
        rows = add("Reshape", values, np.array([0, 0, width]))  # (B, T, E)
        rows.type = node.outputs[0].type
        rows.shape = node.outputs[0].shape
        ir.convenience.replace_all_uses_with(node.outputs[0], rows)
        graph.remove(node, safe=True)
