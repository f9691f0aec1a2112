"""Reads the parts of a graph that running it would not show: cache scales, ids, and epsilons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ...runtime.apps.check.failures import NodeFault
from ...runtime.backends.backend import Array, Arrays
from ..calibration.repeat import ABSOLUTE, RELATIVE, find_far
from ..passes.kv_cache import list_cache_scales
from ..tracing.modules import find_module

NORMS = (
    "LayerNormalization",
    "RMSNormalization",
    "SimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
)
EPSILON_SETTINGS = ("layer_norm_eps", "norm_eps", "rms_norm_eps")  # how configs' settings of them begin
SINGLE = 1e-6  # relative: attributes are stored in fp32
SCALES_APART = 1.75  # of a cache, from those that real text gives here: other text reaches a little more
LOOKUPS = ("Gather", "GatherBlockQuantized")
IDS = ("input_ids", "token_type_ids", "decoder_input_ids")  # inputs whose values are rows of a table
SAME = ("Cast", "Identity")  # give the ids that they read


def describe_node(node: ir.Node) -> str:
    """Return a node in words: its name, its operator and its module."""
    where = f" of {find_module(node)}" if find_module(node) else ""
    return f"node {node.name!r} ({node.op_type}){where}"


def blame(node: ir.Node, words: str) -> NodeFault:
    """Return a failure together with the node that it belongs to."""
    return NodeFault.of(str(node.outputs[0].name), words)


def find_wrong_epsilons(graph: ir.Graph, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the normalizations whose epsilon differs from the config's."""
    setting = next(
        (float(value) for name, value in config.items() if name.startswith(EPSILON_SETTINGS)), None
    )
    for node in graph:
        epsilon = find_epsilon(node)
        if epsilon is None or setting is None:
            continue
        # A constant in fp16 is the epsilon rounded to it.
        if not any(math.isclose(epsilon, x, rel_tol=SINGLE) for x in (setting, float(np.float16(setting)))):
            yield blame(node, f"{describe_node(node)} has epsilon {epsilon:g}, the model's is {setting:g}")


def find_epsilon(node: ir.Node) -> float | None:
    """Return a normalization's epsilon: the attribute, or the value added to a mean of squares."""
    if node.op_type in NORMS:
        usual = 1e-12 if node.op_type.startswith("Skip") else 1e-5
        return node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else usual
    if node.op_type != "Add":
        return None
    for value, other in (node.inputs, node.inputs[::-1]):
        mean = None if value is None else value.producer()
        if mean is not None and mean.op_type == "ReduceMean":
            return read_number(other)
    return None


def read_number(value: ir.Value | None) -> float | None:
    """Return the one value of a constant; None for anything else."""
    constant = None if value is None else ir.convenience.get_const_tensor(value)
    return float(constant.numpy().item()) if constant is not None and constant.size == 1 else None


def find_wrong_cache_scales(graph: ir.Graph, expected: Arrays, same_texts: bool) -> Iterator[str]:
    """Yield scales that do not fit the model's keys and values: too coarse, or with clipped values.

    With the texts that the export had, each channel has a scale of its own to be compared with.
    """
    for node, cache, scale in list_cache_scales(graph):
        wanted = expected.get(str(cache.name))
        if wanted is None:
            continue
        constant = None if scale is None else ir.convenience.get_const_tensor(scale)
        if scale is None or constant is None:
            yield blame(node, f"{describe_node(node)} has no constant scale for {cache.name!r}")
            continue
        fault = describe_scales(constant.numpy(), wanted, same_texts)
        if fault:
            yield blame(node, f"{describe_node(node)} has {scale.name!r}{fault}")


def describe_scales(found: Array, wanted: Array, same_texts: bool) -> str:
    """Return how a cache's scales differ from the expected ones; "" if they do not."""
    if found.shape != wanted.shape:
        return f" of shape {found.shape}, not {wanted.shape}"
    if not same_texts:
        with np.errstate(all="ignore"):
            apart = float(np.exp(np.median(np.abs(np.log(found / wanted)))))
        return "" if apart <= SCALES_APART else f", {apart:.3g} times off what real text needs"  # NaN is not
    far = find_far(found, wanted, RELATIVE, ABSOLUTE)
    if not far.any():
        return ""
    first = int(np.argmax(far))
    return (
        f", {int(far.sum())} of whose {len(far)} channels are not what the export's texts need: channel"
        f" {first} has {found[first]:.4g}, not {wanted[first]:.4g}"
    )


def find_altered_ids(graph: ir.Graph) -> Iterator[str]:
    """Yield the tables of words or segments whose ids differ from those of the graph's input."""
    for node in graph:
        table = node.inputs[0] if node.op_type in LOOKUPS else None
        ids = node.inputs[1] if table is not None and table.const_value is not None else None
        if ids is None:
            continue
        between = find_between(ids)
        if between is not None:
            yield blame(
                node, f"{describe_node(node)} reads ids that {describe_node(between)} may have altered"
            )


def find_between(ids: ir.Value) -> ir.Node | None:
    """Return the node that changes an input's ids; None if they are unchanged, or not ids."""
    first = None
    waiting = [ids]
    seen = set()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            if value.is_graph_input() and str(value.name) in IDS:
                return first
            continue
        if node.op_type == "Shape":
            continue
        if first is None and node.op_type not in SAME:
            first = node
        waiting += [x for x in node.inputs if x is not None]
    return None
