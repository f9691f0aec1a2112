"""Compare what a graph says without running it: its attributes, and its weights with the checkpoint's.

An epsilon that is a tenth of the right one, or weights that are 1 % off, may hide behind rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ...runtime.backends.backend import Array, Arrays
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.diagnostics.metrics import Comparison
from ..passes.kv_cache import KEY_SCALE
from ..passes.weight_files import load_graph
from ..passes.weights import Stored
from ..tracing.modules import find_module

READING = "reading the graph"  # in the place of an engine
CASE = "attributes and weights"
MOST = 3  # faults of a kind that are reported
NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
EPSILONS = ("layer_norm_eps", "norm_eps", "rms_norm_eps")  # how their settings begin
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
PRODUCTS = ("MatMul", "Gemm")
# Relative tolerances: attributes are stored in fp32, constants may be in fp16.
SINGLE = 1e-6
HALF = 2.0**-11
SCALES_APART = 1.75  # of a cache, from those that real text gives here: other text reaches a little more


def compare_structure(
    bundle: Bundle, artifact: Artifact, tensors: Arrays | None = None, cache_scales: Arrays | None = None
) -> Comparison:
    """Compare a graph's attributes; its weights with the checkpoint's, int8 caches with scales, if given."""
    graph = load_graph(bundle.path(artifact.file)).graph
    weights = [] if tensors is None else list(check_weights(graph, tensors))
    ours = not bundle.manifest.source.get("exporter")  # others scale where they like
    failures = [
        *shorten(find_wrong_epsilons(graph, bundle.manifest.config)),
        *shorten(find_wrong_scales(graph, bundle.manifest.config) if ours else ()),
        *shorten(filter(None, weights)),
        *shorten(find_wrong_cache_scales(graph, cache_scales or {})),
    ]
    return report_reading(artifact.id, "attributes" if tensors is None else CASE, len(weights), failures)


def compare_files(name: str, model: ir.Model, other: ir.Model, against: str) -> Comparison:
    """Compare two graphs: attributes of nodes of the same name, and weights of the same name."""
    theirs = {(str(node.name), node.op_type): node for node in other.graph if node.name}
    failures = [
        f"{describe_node(node)} has {key} {one:g}, in {against} it is {two:g}"
        for node in model.graph
        if (twin := theirs.get((str(node.name), node.op_type))) is not None
        for key, one, two in find_different_attributes(node, twin)
    ]
    tensors = {Stored.read(value).parameter: constant for value, constant, _ in list_weights(other.graph)}
    weights = [weight for weight in list_weights(model.graph) if weight[1].size > 1]
    compared = 0
    for value, constant, node in weights:  # a single number, such as a mask's, may be another
        meant = tensors.get(Stored.read(value).parameter)
        if meant is not None and constant.shape == meant.shape:
            compared += 1
            if fault := describe_difference(constant.numpy(), meant.numpy(), f"that of {against}"):
                failures.append(f"weight {value.name!r} of {describe_node(node)} {fault}")
    case = f"attributes and {compared} of {len(weights)} weights, against {against}"
    return report_reading(name, case, compared, shorten(failures))


def report_reading(artifact: str, case: str, weights: int, failures: Sequence[str]) -> Comparison:
    """Return what reading a graph has found, with the number of weights that were compared."""
    return Comparison(
        {"weights": weights}, {}, tuple(failures), artifact=artifact, backend=READING, case=case
    )


def shorten(faults: Iterable[str]) -> list[str]:
    """Return the first faults of a kind, and how many more there are."""
    found = list(faults)
    return found if len(found) <= MOST else [*found[:MOST], f"and {len(found) - MOST} more like it"]


def list_weights(graph: ir.Graph) -> list[tuple[ir.Value, ir.TensorProtocol, ir.Node]]:
    """Return the constants that are floats, with their numbers and the first node that reads each."""
    found = [(value, value.const_value, list(value.uses())) for value in graph.initializers.values()]
    return [
        (value, constant, uses[0].node)
        for value, constant, uses in found
        if constant is not None and constant.dtype in FLOATS and uses
    ]


def find_different_attributes(node: ir.Node, other: ir.Node) -> Iterator[tuple[str, float, float]]:
    """Yield the float attributes that both nodes have, and that differ."""
    for key, attribute in node.attributes.items():
        twin = other.attributes.get(key)
        if twin is not None and attribute.type == twin.type == ir.AttributeType.FLOAT:
            one = attribute.as_float()
            two = twin.as_float()
            if not math.isclose(one, two, rel_tol=SINGLE):
                yield key, one, two


def find_wrong_epsilons(graph: ir.Graph, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the normalisations whose epsilon is not the config's."""
    meant = next((float(value) for name, value in config.items() if name.startswith(EPSILONS)), None)
    if meant is None:
        return
    for node in graph:
        epsilon = find_epsilon(node)
        if epsilon is not None and not math.isclose(epsilon, meant, rel_tol=SINGLE):
            yield f"{describe_node(node)} has epsilon {epsilon:g}, the model's is {meant:g}"


def find_epsilon(node: ir.Node) -> float | None:
    """Return a normalisation's epsilon: the attribute, or the number added to a mean of squares."""
    if node.op_type in NORMS:
        return node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
    mean = node.inputs[0].producer() if node.op_type == "Add" and node.inputs[0] is not None else None
    added = node.inputs[1].const_value if mean is not None and node.inputs[1] is not None else None
    if mean is None or mean.op_type != "ReduceMean" or added is None or added.size != 1:
        return None
    return float(added.numpy().item())


def find_wrong_scales(graph: ir.Graph, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield attention whose scores are not scaled as the config says, by 1 / sqrt(head size) by default."""
    for node in graph:
        size = find_head_size(node)
        scale = find_attention_scale(node)
        if size is None or scale is None:
            continue
        meant = config.get("attention_scale") or size**-0.5
        if not math.isclose(scale, meant, rel_tol=HALF if isinstance(scale, np.float16) else SINGLE):
            yield f"{describe_node(node)} has scale {scale:g}, heads of {size} need {meant:g}"


def find_wrong_cache_scales(graph: ir.Graph, meant: Arrays) -> Iterator[str]:
    """Yield scales far from what the model's keys and values need: steps too coarse, or values clipped."""
    for node in graph:
        if node.op_type != "GroupQueryAttention" or len(node.inputs) < KEY_SCALE + 2:
            continue
        for cache, scale in zip(node.inputs[3:5], node.inputs[KEY_SCALE : KEY_SCALE + 2], strict=True):
            wanted = None if cache is None else meant.get(str(cache.name))
            if wanted is None or scale is None or scale.const_value is None:
                continue
            found = scale.const_value.numpy()
            if found.shape != wanted.shape:
                yield f"{describe_node(node)} has {scale.name!r} of shape {found.shape}, not {wanted.shape}"
                continue
            with np.errstate(all="ignore"):
                apart = float(np.exp(np.median(np.abs(np.log(found / wanted)))))
            if not apart <= SCALES_APART:  # NaN is not
                yield f"{describe_node(node)} has {scale.name!r}, {apart:.3g} times off what real text needs"


def find_head_size(node: ir.Node) -> int | None:
    """Return the head size of a node that scales attention; None for others, or if the graph does not say."""
    index = {"Attention": 0, "GroupQueryAttention": 3}.get(node.op_type)
    value = None if index is None else node.inputs[index]
    if node.op_type == "Mul" and node.outputs[0].shape is not None and len(node.outputs[0].shape) in (4, 5):
        value = node.outputs[0]  # (B, H, T, D), or (B, K, H / K, T, D)
    last = None if value is None or value.shape is None else value.shape[-1]
    if not isinstance(last, int):
        return None
    return last // node.attributes.get_int("q_num_heads", 1)  # of joined heads


def find_attention_scale(node: ir.Node) -> float | np.floating[Any] | None:
    """Return attention's scale: the attribute, or the one number that heads are multiplied by."""
    if node.op_type != "Mul":
        return node.attributes["scale"].as_float() if "scale" in node.attributes else None
    factor = node.inputs[1].const_value if node.inputs[1] is not None else None
    if factor is None or factor.size != 1:
        return None
    number: np.floating[Any] = factor.numpy().flat[0]
    return number


def check_weights(graph: ir.Graph, tensors: Arrays) -> Iterator[str]:
    """Yield what is wrong with each weight that is kept as floats, or ""."""
    for value, constant, node in list_weights(graph):
        stored = Stored.read(value)
        weight = f"weight {value.name!r} of {describe_node(node)}"
        if stored.parameter in tensors:
            meant = stored.of(tensors[stored.parameter], constant.shape.numpy())
            fault = describe_difference(constant.numpy(), meant)
            if isinstance(constant, ir.ExternalTensor):
                constant.release()  # what is mapped counts as this process's memory
            yield f"{weight} {fault}" if fault else ""
        elif len(constant.shape) == 2 and any(use.node.op_type in PRODUCTS for use in value.uses()):
            yield f"{weight} is no tensor of the checkpoint"


def describe_difference(got: Array, meant: Array, whose: str = "the checkpoint's") -> str:
    """Return in words how `got` differs from `meant` in the coarser of both types; "" if it does not."""
    if got.shape != meant.shape:
        return f"is {got.shape}, {whose} is {meant.shape}"
    coarser = min(got.dtype, meant.dtype, key=lambda dtype: dtype.itemsize)
    if np.array_equal(got.astype(coarser, copy=False), meant.astype(coarser, copy=False)):
        return ""
    off = np.abs(got.astype(np.float64) - meant).max()
    largest = np.abs(meant).max()
    return f"is not {whose}: off by up to {off:.3g} of {largest:.3g}"


def describe_node(node: ir.Node) -> str:
    where = f" of {find_module(node)}" if find_module(node) else ""
    return f"node {node.name!r} ({node.op_type}){where}"
