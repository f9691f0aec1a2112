"""Finds node inputs that ONNX Runtime's CUDA provider reads on the host, and whether they are there.

A kernel on a GPU is launched before what comes before it has been computed. What it reads on the host must be
known by then: a graph's input, a constant, or what ONNX Runtime computes on the CPU from shapes. Anything
else is copied from the GPU too late, and the kernel reads what lay there before.

That holds for each input that a kernel declares so. ONNX Runtime puts a copy before it, MemcpyToHost, which
is only begun. It waits for the copy where the reader runs in another stream, and a kernel of the GPU does
not: GroupQueryAttention, which declares its total_sequence_length, read zeros on an H200. What a branch or a
body of a loop is given from outside is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

# By operator, with the domain of those that are not ONNX's own. Read in ONNX Runtime's registrations of
# kernels (OrtMemTypeCPUInput); where versions differ, what any of them has.
HOST_INPUTS = {
    "Clip": (1, 2),
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "Dropout": (1, 2),
    "Expand": (1,),
    "GRU": (4,),
    "If": (0,),
    "LSTM": (4,),
    "Loop": (0, 1),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1, 2),
    "Pad": (1, 2, 3),
    "RNN": (4,),
    "Range": (0, 1, 2),
    "ReduceL1": (1,),
    "ReduceL2": (1,),
    "ReduceLogSum": (1,),
    "ReduceLogSumExp": (1,),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "ReduceSumSquare": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "SequenceAt": (1,),
    "SequenceErase": (1,),
    "SequenceInsert": (2,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
    "com.microsoft.Attention": (6,),
    "com.microsoft.BeamSearch": (0, 1, 2, 3, 4, 5, 6, 7),
    "com.microsoft.DecoderMaskedMultiHeadAttention": (7, 8),
    "com.microsoft.DecoderMaskedSelfAttention": (6,),
    "com.microsoft.GreedySearch": (0, 1, 2, 3, 6),
    "com.microsoft.GroupQueryAttention": (6,),
    "com.microsoft.QAttention": (3, 4, 6, 7),
    "com.microsoft.Sampling": (0, 1, 2, 3, 6),
    "com.microsoft.SparseAttention": (7,),
}
SHAPES = ("Shape", "Size")  # whose results are on the host
GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
ON_GPU = "gpu"
ON_HOST = "host"
CONSTANT = "constant"


def find_late_inputs(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Yield the nodes that read a GPU's results on the host, and those results; nodes of branches too."""
    for one in (graph, *graph.subgraphs()):
        yield from find_late_inputs_alone(one)


def find_late_inputs_alone(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Yield the same as `find_late_inputs` for a graph, without the graphs that its nodes hold."""
    on_host: set[ir.Value] = set()
    for node, place in place_nodes(graph):
        for index in list_host_inputs(node) if place != CONSTANT else ():
            value = node.inputs[index] if index < len(node.inputs) else None
            if value is not None and value.name and not (is_given(value, graph) or value in on_host):
                yield node, value
        if place != ON_GPU:
            on_host.update(node.outputs)


def place_nodes(graph: ir.Graph) -> Iterator[tuple[ir.Node, str]]:
    """Yield a graph's nodes, each `ON_GPU`, `ON_HOST`, or `CONSTANT` if it is computed when it is loaded.

    Those of branches are left out; so is whether there is a kernel on a GPU. Quantized weights stay as they
    are: each call dequantizes them, in the kernel of a product or before it.
    """
    constants = set(graph.initializers.values())
    on_host: set[ir.Value] = set()
    for node in graph:
        is_alone = not any(attribute.type in GRAPHS for attribute in node.attributes.values())
        stays = node.op_type == "DequantizeLinear"
        place = ON_GPU
        if is_alone and not stays and all(value is None or value in constants for value in node.inputs):
            constants.update(node.outputs)
            place = CONSTANT
        elif runs_on_host(node, on_host, constants):
            place = ON_HOST
        if place != ON_GPU:
            on_host.update(node.outputs)
        yield node, place


def list_host_inputs(node: ir.Node) -> tuple[int, ...]:
    """Return which inputs a node's kernel reads on the host."""
    is_standard = node.domain in ("", "ai.onnx")
    return HOST_INPUTS.get(node.op_type if is_standard else f"{node.domain}.{node.op_type}", ())


def runs_on_host(node: ir.Node, on_host: set[ir.Value], constants: set[ir.Value]) -> bool:
    """Tell whether ONNX Runtime leaves a node on the CPU: a shape, or what follows from shapes alone.

    A node that reads a shape on the host anyway, such as Range, is launched on the GPU.
    """
    if node.op_type in SHAPES:
        return True
    wanted = list_host_inputs(node)
    read = [(index, value) for index, value in enumerate(node.inputs) if value is not None]
    computed = [
        (index, value) for index, value in read if not (is_given(value, node.graph) or value in constants)
    ]
    return bool(computed) and all(value in on_host and index not in wanted for index, value in computed)


def is_given(value: ir.Value, graph: ir.Graph | None) -> bool:
    """Tell whether a value is a constant or an input of a graph, or comes from a graph around it."""
    producer = value.producer()
    return producer is None or producer.graph is not graph
