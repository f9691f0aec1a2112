"""What a graph must say, whatever its numbers come to: attributes, and weights that are the checkpoint's.

An epsilon that is a tenth of the right one, or weights that are 1 % off, may hide behind rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ..modules import module_of
from ..passes.weights import TRANSPOSED
from .gate import Comparison

if TYPE_CHECKING:
    from torch import Tensor

CASE = "attributes and weights"
MOST = 3  # faults of a kind that are told
NORMS = ("LayerNormalization", "RMSNormalization")
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
SINGLE = 1e-6  # relative: attributes are written in single precision


def compare_structure(
    bundle: Bundle, artifact: Artifact, tensors: Mapping[str, Tensor] | None = None
) -> Comparison:
    """Reads a graph without running it.

    Args:
        bundle: that has the graph.
        artifact: the graph.
        tensors: the checkpoint's, by name; without them only attributes are read.
    """
    graph = ir.load(bundle.path(artifact.file)).graph
    weights = list(checked_weights(graph, tensors or {}))
    failures = []
    for faults in (
        list(wrong_epsilons(graph, bundle.manifest.config)),
        list(wrong_scales(graph)),
        [fault for fault in weights if fault is not None],
    ):
        failures += faults[:MOST]
        if len(faults) > MOST:
            failures.append(f"and {len(faults) - MOST} more like it")
    return Comparison(
        artifact=artifact.id,
        backend="reading the graph",
        case=CASE if tensors is not None else "attributes",
        metrics={"weights": len(weights)},
        limits={},
        failures=tuple(failures),
    )


def wrong_epsilons(graph: ir.Graph, config: Mapping[str, Any]) -> Iterator[str]:
    """Normalisations whose epsilon is not the config's."""
    meant = next((float(value) for name, value in config.items() if name.startswith("layer_norm_eps")), None)
    for node in graph:
        if node.op_type in NORMS and meant is not None:
            epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
            if not math.isclose(epsilon, meant, rel_tol=SINGLE):
                yield f"{told(node)} has epsilon {epsilon:g}, the model's is {meant:g}"


def wrong_scales(graph: ir.Graph) -> Iterator[str]:
    """Attention nodes whose scale is not 1 / sqrt(head size)."""
    for node in graph:
        size = head_size(node)
        if size is None or "scale" not in node.attributes:
            continue
        scale, meant = node.attributes["scale"].as_float(), size**-0.5
        if not math.isclose(scale, meant, rel_tol=SINGLE):
            yield f"{told(node)} has scale {scale:g}, heads of {size} need {meant:g}"


def head_size(node: ir.Node) -> int | None:
    """Of an attention node; None of others, and where the graph does not say."""
    index = {"Attention": 0, "GroupQueryAttention": 3}.get(node.op_type)
    value = None if index is None else node.inputs[index]
    last = None if value is None or value.shape is None else value.shape[-1]
    return last if isinstance(last, int) else None


def checked_weights(graph: ir.Graph, tensors: Mapping[str, Tensor]) -> Iterator[str | None]:
    """What is wrong with each weight that is kept as floats, or None."""
    for value in graph.initializers.values():
        name, constant = str(value.name), value.const_value
        path = name.removesuffix("_fp16").removesuffix(TRANSPOSED)
        if constant is None or path not in tensors or constant.dtype not in FLOATS:
            continue
        meant = tensors[path].detach().numpy()
        meant = meant.T if TRANSPOSED in name else meant
        got = constant.numpy()
        if isinstance(constant, ir.ExternalTensor):
            got = got.copy()
            constant.release()  # what is mapped counts as this process's memory
        if got.shape != meant.shape:
            yield f"weight {name} is {got.shape}, the checkpoint's is {meant.shape}"
        elif np.array_equal(got, meant.astype(got.dtype)):
            yield None
        else:
            off, largest = np.abs(got.astype(np.float64) - meant).max(), np.abs(meant).max()
            yield f"weight {name} is not the checkpoint's: off by up to {off:.3g} of {largest:.3g}"


def told(node: ir.Node) -> str:
    where = f" of {module_of(node)}" if module_of(node) else ""
    return f"node {node.name!r} ({node.op_type}){where}"
