"""Writes mixtures of experts into graphs: each expert gets the rows that chose it, by one Split."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch import Tensor, nn

from ...models.experts import Experts


def choose_experts(model: nn.Module, computes_all: bool) -> None:
    """Let a model's experts compute all rows, or write the nodes by which each computes its own.

    TensorRT takes no Split whose lengths are computed.
    """
    for module in model.modules():
        if isinstance(module, Experts):
            module.computes_all = computes_all
            module.split = write_split
            module.join = write_concat


def write_split(rows: Tensor, counts: Tensor) -> Sequence[Tensor]:
    """Return the results of a Split by computed lengths, each said to be as long as `rows` (R, E)."""
    parts = counts.shape[0]
    return torch.onnx.ops.symbolic_multi_out(
        "Split",
        (rows, counts),
        attrs={"axis": 0},
        dtypes=(rows.dtype,) * parts,
        shapes=(rows.shape,) * parts,
        version=20,
    )


def write_concat(parts: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return the result of a Concat of such parts, as long as `rows` (R, E)."""
    return torch.onnx.ops.symbolic(
        "Concat", tuple(parts), attrs={"axis": 0}, dtype=rows.dtype, shape=rows.shape, version=20
    )


def name_part_lengths(graph: ir.Graph) -> None:
    """Give the rows of each part of a Split an axis of its own, in all that is computed of it."""
    for split in graph:
        if split.op_type != "Split" or len(split.inputs) < 2 or split.inputs[1] is None:
            continue
        if split.inputs[1].producer() is None:  # constant lengths
            continue
        for number, part in enumerate(split.outputs):
            waiting = [part]
            while waiting:
                value = waiting.pop()
                if value.shape is not None:
                    value.shape = ir.Shape([f"{split.name}.{number}", *list(value.shape)[1:]])
                readers = [node for node, _ in value.uses() if node.op_type != "Concat"]
                waiting += [output for node in readers for output in node.outputs]
