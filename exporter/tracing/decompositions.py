"""Spares torch.onnx a second trace to decompose operations, as nearly all of ours exist in ONNX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.onnx._internal.exporter import _decomp, _fx_passes

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node
    from torch.onnx._internal.exporter._registration import ONNXRegistry

aten = torch.ops.aten
CHECKS = ("aten::_assert", "aten::sym_constrain_range")  # which torch.onnx removes itself

Call: TypeAlias = tuple[Any, tuple[Any, ...], dict[str, Any]]  # an operation and its arguments


def squeeze(x: Node, dims: list[int]) -> Call:
    """Return the operation with dims counted from 0, only those of length 1, as it accepts no others."""
    shape = x.meta["val"].shape
    return torch.ops.prims.squeeze.default, (x, [d % len(shape) for d in dims if shape[d] == 1]), {}


# The operations of our models that ONNX has no good name for: what is called instead.
SAME: dict[Any, Callable[..., Call]] = {
    aten.__and__.Tensor: lambda x, y: (aten.bitwise_and.Tensor, (x, y), {}),
    aten.mT.default: lambda x: (aten.transpose.int, (x, -2, -1), {}),  # else an Einsum
    aten.square.default: lambda x: (aten.pow.Tensor_Scalar, (x, 2), {}),
    aten.squeeze.dims: squeeze,
    aten.to.dtype: lambda x, dtype, *copying: (aten._to_copy.default, (x,), {"dtype": dtype}),
}


@contextmanager
def rename_instead_of_decomposing() -> Iterator[None]:
    """Let torch.onnx rename the operations of `SAME`; a graph that has others is decomposed as usual.

    Decomposing traces the graph once more, which takes as long as tracing the model does.
    """
    decompose = _fx_passes.decompose_with_registry

    def rename(exported_program: ExportedProgram, registry: ONNXRegistry) -> ExportedProgram:
        graph = exported_program.graph_module.graph
        for node in graph.nodes:
            if node.target in SAME and not node.kwargs:
                node.target, node.args, node.kwargs = SAME[node.target](*node.args)
        graph.eliminate_dead_code()
        exported_program.graph_module.recompile()
        known = set(_decomp.get_onnx_implemented_overloads(registry))
        if all(is_known(node, known) for node in graph.nodes):
            return exported_program
        return decompose(exported_program, registry)

    _fx_passes.decompose_with_registry = rename
    try:
        yield
    finally:
        _fx_passes.decompose_with_registry = decompose


def is_known(node: Node, known: set[Any]) -> bool:
    """Tell whether ONNX has an equivalent of a node's operation."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or schema.name.startswith(CHECKS):
        return True
    return node.target in known and not schema.is_mutable
