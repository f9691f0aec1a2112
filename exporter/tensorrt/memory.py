"""What a plan will need of a GPU's memory, estimated from its graph before there is a GPU to ask."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.bundle.manifest import Artifact
from .profiles import Profile

if TYPE_CHECKING:
    from onnx import TypeProto

ALIVE = 2  # the largest results that exist at one time: what a layer reads, and what it writes


def estimates(
    graph: Path, artifact: Artifact, profiles: Sequence[Profile], weights: int
) -> list[dict[str, int]]:
    """Bytes on the device for each profile's largest shapes.

    Args:
        graph: the ONNX file, whose shapes are symbolic.
        weights: their bytes.

    Returns:
        "weights"; "tensors", inputs, outputs and caches, where what is written in place counts once; and
        "between", the largest intermediate results, `ALIVE` of them.
    """
    import onnx

    model = onnx.load(graph, load_external_data=False)
    between = [value.type.tensor_type for value in model.graph.value_info]
    found = []
    for profile in profiles:
        lengths = {name: high for name, (_, _, high) in profile.axes.items()}
        outputs = [spec for spec in artifact.outputs if spec.name not in artifact.aliases]
        tensors = sum(
            math.prod(a if isinstance(a, int) else lengths.get(a, 1) for a in spec.axis_names())
            * np.dtype(spec.dtype).itemsize
            for spec in (*artifact.inputs, *outputs)
        )
        sizes = sorted(bytes_of(tensor, lengths) for tensor in between)
        found.append({"weights": weights, "tensors": tensors, "between": sum(sizes[-ALIVE:])})
    return found


def bytes_of(tensor: TypeProto.Tensor, lengths: Mapping[str, int]) -> int:
    """A tensor's largest size; 0 where its shape is not known, or has only numbers, as a weight's."""
    from onnx import helper

    if not any(d.dim_param for d in tensor.shape.dim):
        return 0
    dims = [length_of(d.dim_param, d.dim_value, lengths) for d in tensor.shape.dim]
    return math.prod(dims) * np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)).itemsize


def length_of(expression: str, number: int, lengths: Mapping[str, int]) -> int:
    """Of an axis such as "batch*tokens"; 0 of one with other names."""
    if not expression:
        return number

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(n)):
                return n
            case ast.Name(id=name):
                return lengths.get(name, 0)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)
        return 0

    try:
        return value(ast.parse(expression, mode="eval").body)
    except SyntaxError:
        return 0
