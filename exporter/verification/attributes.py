"""Reads the attributes of a graph's nodes against what the model says, however little they change."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ...runtime.backends.backend import Array, Arrays
from ..calibration.repeat import ABSOLUTE, RELATIVE, find_far
from ..passes.kv_cache import KEY_SCALE, list_cache_scales
from ..tracing.modules import find_module
from .meant import AttentionMeant, Meant

NORMS = (
    "LayerNormalization",
    "RMSNormalization",
    "SimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
)
EPSILON_SETTINGS = ("layer_norm_eps", "norm_eps", "rms_norm_eps")  # how configs' settings of them begin
# Relative tolerances: attributes are stored in fp32, constants may be in fp16.
SINGLE = 1e-6
HALF = 2.0**-11
SCALES_APART = 1.75  # of a cache, from those that real text gives here: other text reaches a little more
DEFAULTS = {"local_window_size": -1}  # of attributes that a graph does not say, where it is not 0
STORED = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}


def describe_node(node: ir.Node) -> str:
    """Return a node in words: its name, its operator and its module."""
    where = f" of {find_module(node)}" if find_module(node) else ""
    return f"node {node.name!r} ({node.op_type}){where}"


def find_wrong_epsilons(
    graph: ir.Graph, config: Mapping[str, Any], meant: Meant | None = None
) -> Iterator[str]:
    """Yield the normalisations whose epsilon is not the model's, or the config's without a model."""
    setting = next(
        (float(value) for name, value in config.items() if name.startswith(EPSILON_SETTINGS)), None
    )
    for node in graph:
        epsilon = find_epsilon(node)
        if epsilon is None:
            continue
        own = set() if meant is None else meant.find_epsilons(find_module(node))
        if not own and setting is not None:
            own = {setting}
        # A constant in fp16 is the epsilon rounded to it.
        near = [x for x in own if is_same(epsilon, x) or is_same(epsilon, float(np.float16(x)))]
        if own and not near:
            whose = " or ".join(f"{x:g}" for x in sorted(own))
            yield f"{describe_node(node)} has epsilon {epsilon:g}, the model's is {whose}"


def is_same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SINGLE)


def find_epsilon(node: ir.Node) -> float | None:
    """Return a normalisation's epsilon: the attribute, or the number added to a mean of squares."""
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
    """Return the one number that a constant holds; None for anything else."""
    constant = None if value is None else ir.convenience.get_const_tensor(value)
    return float(constant.numpy().item()) if constant is not None and constant.size == 1 else None


def find_wrong_attention(graph: ir.Graph, meant: Meant, context: int) -> Iterator[str]:
    """Yield attention whose attributes are not the model's; `context` is how many tokens it is run with.

    A window as long as the context and none are the same.
    """
    for node in graph:
        if not meant.layers:
            return
        if node.op_type == "GroupQueryAttention":
            cache = "" if node.inputs[3] is None else str(node.inputs[3].name)
            number = re.search(r"\.(\d+)\.", cache)
            if number is None or int(number[1]) >= len(meant.layers):
                yield f"{describe_node(node)} has the cache {cache!r}, which is no layer's"
                continue
            wanted = describe_group_query(node, meant.layers[int(number[1])], context)
        else:
            layer = meant.find_layer(find_module(node))
            if node.op_type == "Mul" and meant.is_ours and layer is not None:
                yield from compare_scale(node, layer)
            if node.op_type != "Attention" or layer is None:
                continue
            wanted = describe_plain(node, layer)
        yield from compare_attributes(node, wanted)


def compare_scale(node: ir.Node, layer: AttentionMeant) -> Iterator[str]:
    """Yield in words that heads are multiplied by one number, which is not the scale of their attention."""
    scale = find_heads_factor(node)
    if scale is None:
        return
    rounding = HALF if isinstance(scale, np.float16) else SINGLE
    if not any(math.isclose(scale, x, rel_tol=rounding) for x in layer.scales):
        meant = " or ".join(f"{x:g}" for x in layer.scales)
        yield f"{describe_node(node)} has scale {scale:g}, the model's is {meant}"


def find_heads_factor(node: ir.Node) -> np.floating[Any] | None:
    """Return the one number that a Mul multiplies heads (B, H, T, D), or (B, K, H / K, T, D), by."""
    shape = node.outputs[0].shape
    factor = node.inputs[1].const_value if node.inputs[1] is not None else None
    is_heads = shape is not None and len(shape) in (4, 5) and isinstance(shape[-1], int)  # scores are not
    if not is_heads or factor is None or factor.size != 1:
        return None
    number: np.floating[Any] = factor.numpy().flat[0]
    return number


def describe_group_query(node: ir.Node, layer: AttentionMeant, context: int) -> dict[str, tuple[Any, ...]]:
    """Return the values that each attribute of a GroupQueryAttention may have."""
    window = layer.window
    windows = (-1,) if window is None else (window, -1) if window >= context else (window,)
    stored = len(node.inputs) > KEY_SCALE and node.inputs[KEY_SCALE] is not None
    return {
        "num_heads": (layer.heads,),
        "kv_num_heads": (layer.shared_heads,),
        "scale": layer.scales,
        "local_window_size": windows,
        "softcap": (layer.softcap or 0.0,),
        "do_rotary": (int(layer.rotates),),
        "rotary_interleaved": (0,),
        **({name: (value,) for name, value in STORED.items()} if stored else {}),
    }


def describe_plain(node: ir.Node, layer: AttentionMeant) -> dict[str, tuple[Any, ...]]:
    """Return the values that each attribute of an Attention may have."""
    wanted: dict[str, tuple[Any, ...]] = {"scale": layer.scales, "is_causal": (0,), "softcap": (0.0,)}
    queries = node.inputs[0]
    if queries is not None and queries.shape is not None and len(queries.shape) == 3:
        wanted |= {"q_num_heads": (layer.heads,), "kv_num_heads": (layer.heads,)}
    return wanted


def compare_attributes(node: ir.Node, wanted: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """Yield the attributes of a node that are none of those wanted, and those that nobody wants."""
    for name in sorted({*wanted, *node.attributes}):
        got = node.attributes[name].value if name in node.attributes else DEFAULTS.get(name, 0)
        allowed = wanted.get(name)
        if allowed is None:
            yield f"{describe_node(node)} has {name} {got}, which no graph of this model has"
        elif not any(is_same(got, x) if isinstance(x, float) else got == x for x in allowed):
            meant = " or ".join(f"{x:g}" if isinstance(x, float) else f"{x}" for x in allowed)
            found = f"{got:g}" if isinstance(got, float) else f"{got}"
            yield f"{describe_node(node)} has {name} {found}, the model's is {meant}"


def find_wrong_cache_scales(graph: ir.Graph, meant: Arrays, same_texts: bool) -> Iterator[str]:
    """Yield scales that are not what the model's keys and values need: too coarse, or values clipped.

    With the texts that the export had, each channel has a scale of its own to be held to.
    """
    for node, cache, scale in list_cache_scales(graph):
        wanted = meant.get(str(cache.name))
        if wanted is None:
            continue
        constant = None if scale is None else ir.convenience.get_const_tensor(scale)
        if scale is None or constant is None:
            yield f"{describe_node(node)} has no constant scale for {cache.name!r}"
            continue
        fault = describe_scales(constant.numpy(), wanted, same_texts)
        if fault:
            yield f"{describe_node(node)} has {scale.name!r}{fault}"


def describe_scales(found: Array, wanted: Array, same_texts: bool) -> str:
    """Return how a cache's scales differ from those that are wanted; "" if they do not."""
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
