"""Which inputs of nodes ONNX Runtime's CUDA provider reads on the host, and whether they arrive there.

A kernel on a GPU is launched before what comes before it has been computed. What it reads on the host must be
known by then: a graph's input, a constant, or what ONNX Runtime computes on the CPU from shapes. Anything
else is copied from the GPU too late, and the kernel reads what lay there before.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

# By operator. Read in ONNX Runtime's registrations of kernels (OrtMemTypeCPUInput).
HOST_INPUTS = {
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "Expand": (1,),
    "GroupQueryAttention": (6,),
    "OneHot": (1,),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
}
SHAPES = ("Shape", "Size")  # whose results are on the host


def find_late_inputs(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Yield the nodes that read on the host what a GPU computes, and what they read."""
    constants = set(graph.initializers.values())
    on_host: set[ir.Value] = set()
    for node in graph:
        if all(value is None or value in constants for value in node.inputs):  # computed when it is loaded
            constants.update(node.outputs)
            on_host.update(node.outputs)
            continue
        for index in HOST_INPUTS.get(node.op_type, ()):
            value = node.inputs[index] if index < len(node.inputs) else None
            if value is not None and value.name and not (is_given(value) or value in on_host):
                yield node, value
        if runs_on_host(node, on_host, constants):
            on_host.update(node.outputs)


def runs_on_host(node: ir.Node, on_host: set[ir.Value], constants: set[ir.Value]) -> bool:
    """Tell whether ONNX Runtime leaves a node on the CPU: a shape, or what follows from shapes alone.

    A node that reads a shape on the host anyway, such as Range, is launched on the GPU.
    """
    if node.op_type in SHAPES:
        return True
    wanted = HOST_INPUTS.get(node.op_type, ())
    read = [(index, value) for index, value in enumerate(node.inputs) if value is not None]
    computed = [(index, value) for index, value in read if not (is_given(value) or value in constants)]
    return bool(computed) and all(value in on_host and index not in wanted for index, value in computed)


def is_given(value: ir.Value) -> bool:
    """Tell whether a value is a constant or a graph's input, which no node computes."""
    return value.producer() is None
