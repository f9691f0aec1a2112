"""Estimates the GPU memory that a plan needs, from its graph and without a GPU."""

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


def estimate_memory(
    graph: Path, artifact: Artifact, profiles: Sequence[Profile], weights: int
) -> list[dict[str, int]]:
    """Estimate the bytes on the device for each profile's largest shapes; `weights` is their size in bytes.

    "tensors" are inputs, outputs and caches, where what is written in place counts once; "between" are the
    largest intermediate results, `ALIVE` of them.
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
        sizes = sorted(count_bytes(tensor, lengths) for tensor in between)
        found.append({"weights": weights, "tensors": tensors, "between": sum(sizes[-ALIVE:])})
    return found


def count_bytes(tensor: TypeProto.Tensor, lengths: Mapping[str, int]) -> int:
    """Return a tensor's largest size in bytes; 0 for an unknown shape, or one of numbers alone (a weight)."""
    from onnx import helper

    if not any(d.dim_param for d in tensor.shape.dim):
        return 0
    dims = [evaluate_length(d.dim_param, d.dim_value, lengths) for d in tensor.shape.dim]
    return math.prod(dims) * np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)).itemsize


def evaluate_length(expression: str, number: int, lengths: Mapping[str, int]) -> int:
    """Return the length of an axis such as "batch*tokens"; 0 where it has unknown names."""
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
