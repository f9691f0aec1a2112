"""Graphs that somebody else quantized, such as NVIDIA ModelOpt: QuantizeLinear and DequantizeLinear.

Their codes and scales are kept as they are. What PyTorch's weights lose by them is their author's choice, so
a bundle is compared with the folder's own graphs, in which the weights are dequantized: see `unrounded` for
their activations.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common

from ...runtime.errors import InputError
from ..errors import CheckpointError
from ..passes.quantization_form import DEQUANTIZES, FIX, KEPT, OPERATORS, find_form_faults, find_shape
from ..passes.unrounded import list_rounding
from ..tracing.modules import find_module

TENSORRT = "trt"  # a domain of operators, of which TRT_FP8QuantizeLinear is one


def list_quantizing_nodes(model: ir.Model) -> list[ir.Node]:
    """Return the nodes that quantize or dequantize, those of branches too."""
    return [node for graph in model.graphs() for node in graph if node.op_type in OPERATORS]


def check_form(model: ir.Model, path: Path) -> None:
    """Refuse zero points, bad or missing scales, and operators that ONNX lacks, at the node and module."""
    for node in (node for graph in model.graphs() for node in graph if node.domain == TENSORRT):
        raise CheckpointError(
            f"{path}: {describe(node)}: an operator of TensorRT's own domain {TENSORRT!r}, which ONNX lacks;"
            f" write it with ONNX's own {' and '.join(OPERATORS)}, as"
            " `python -m modelopt.onnx.quantization` does"
        )
    found = list_quantizing_nodes(model)
    if any(has_unknown_shape(node) for node in found):
        common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    for node in found:
        for fault in find_form_faults(node, read_numbers):
            raise CheckpointError(f"{path}: {describe(node)}: {fault}; {FIX}")


def mark_kept(model: ir.Model) -> None:
    """Mark quantizing nodes to keep their scales, and name all nodes, to find them in a bundle's graphs."""
    found = list_quantizing_nodes(model)
    for node in found:
        node.metadata_props[KEPT] = "scales"
    nodes = [node for graph in model.graphs() for node in graph] if found else []
    taken = {node.name for node in nodes}
    numbers = count()
    for node in nodes:
        while not node.name:
            name = f"{node.op_type}_{next(numbers)}"
            node.name = None if name in taken else name


def has_unknown_shape(node: ir.Node) -> bool:
    """Tell whether a node has several scales for values of which the file does not tell the shape."""
    scales = read_numbers(node.inputs[1])
    return scales is not None and scales.size > 1 and find_shape(node.inputs[0]) is None


def read_numbers(value: ir.Value | None) -> npt.NDArray[np.generic] | None:
    """Return a constant's numbers; None for what a graph computes."""
    constant = None if value is None else ir.convenience.get_const_tensor(value)
    return None if constant is None else constant.numpy()


def describe(node: ir.Node) -> str:
    """Return a node in words, with its module: its own, or that of what reads its result."""
    readers = [use.node for output in node.outputs for use in output.uses()]
    named = next(filter(None, map(find_module, (node, *readers))), "")
    at = f" in {named}" if named else f", read by {readers[0].name!r}" if readers else ""
    kind = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    return f"node {node.name!r} ({kind}){at}"


def check_reference(model: ir.Model, path: Path, has_weights: bool, rounds: bool) -> None:
    """Refuse to compare quantized graphs with what cannot tell whether they are right.

    Activations are compared without their rounding, where `rounds` says that the kind of model allows it.
    """
    if not any(KEPT in node.metadata_props for node in list_quantizing_nodes(model)):
        return
    if has_weights:
        raise InputError(
            f"{path} has quantized weights, which differ from a checkpoint's by their rounding: import"
            " them without --source, and leave out the weights in FOLDER; the bundle is then compared with"
            " FOLDER's graphs"
        )
    for node in list_rounding(model):
        fault = find_unlike_pair(node) if rounds else "an encoder-decoder's scales are not compared"
        if fault:
            way = "Quantize weights alone"
            if rounds:
                way += ", or with constant scales and a DequantizeLinear right behind"
            raise InputError(
                f"{path} rounds activations at {describe(node)}: {fault}, so this rounding cannot be left out"
                " to compare. With it fp32's last bit, which moves a value by a whole step, looks like an"
                " error."
                f" {way}; or import it with --no-verify, which proves nothing"
            )


def find_unlike_pair(node: ir.Node) -> str:
    """Return in words why a QuantizeLinear is no half of a pair that a comparison can leave out; else ""."""
    (codes,) = node.outputs
    others = [use.node for use in codes.uses() if use.node.op_type != DEQUANTIZES]
    if others:
        return f"its codes are read by {describe(others[0])}"
    if codes.is_graph_output():
        return "its codes are an output of the graph"
    pair = (node, *(use.node for use in codes.uses()))
    computed = next((one for one in pair if read_numbers(one.inputs[1]) is None), None)
    return "" if computed is None else f"the scale of {describe(computed)} is computed"
