"""Rules about Attention and its cache."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ..targets import Target
from ..tensorrt.profiles import SLOTS
from .model import (
    LintModel,
    attribute,
    dims_of,
    has_input,
    input_at,
    is_standard,
    output_at,
    type_name,
    type_of,
)
from .operator_tables import DROPPED_ATTRIBUTES, DROPPED_INPUTS
from .rule import Hit, rule

# Values that come from a cache only, by the names of their inputs.
PAST = {4: "past_key", 5: "past_value"}
LENGTH_AXIS = 2  # of a cache (batch, heads, length, head size)
CACHE_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def operators(model: LintModel, name: str) -> Iterator[ir.Node]:
    return (node for node in model.nodes if node.op_type == name and is_standard(node))


@rule(
    "input-dropped",
    "what the parser passes over in silence: Attention's nonpad_kv_seqlen and windows",
    fix="write it into attn_mask",
    severity="wrong",
)
def input_dropped(model: LintModel, target: Target) -> Iterator[Hit]:
    for (operator, index), name in DROPPED_INPUTS.items():
        for node in operators(model, operator):
            if has_input(node, index):
                yield Hit(f"the parser passes over the input {name}: no key is left out", node)
    for operator, name, none in DROPPED_ATTRIBUTES if target.engine == "tensorrt-rtx" else ():
        for node in operators(model, operator):
            if attribute(node, name, none) != none:
                value = attribute(node, name)
                yield Hit(f"the parser passes over the attribute {name} = {value}: no key is left out", node)


@rule(
    "attention-past",
    "a past inside Attention",
    fix="Concat past and new keys before Attention, or write them into slots with TensorScatter",
)
def attention_past(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in operators(model, "Attention"):
        given = [name for index, name in PAST.items() if has_input(node, index)]
        if given:
            yield Hit(f"the parser refuses the inputs {' and '.join(given)}", node)


@rule("attention-causal-mask", "both is_causal and a mask", fix="write both into attn_mask")
def attention_causal_mask(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in operators(model, "Attention"):
        if attribute(node, "is_causal", 0) and has_input(node, 3):
            yield Hit("is_causal and attn_mask exclude each other", node)


@rule("attention-types", "V or a mask of another type than Q", fix="Cast it to the type of Q")
def attention_types(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in operators(model, "Attention"):
        query = type_of(input_at(node, 0))
        for index, name in ((2, "V"), (3, "attn_mask")):
            other = type_of(input_at(node, index))
            if query is not None and other not in (None, query, ir.DataType.BOOL):
                assert other is not None
                yield Hit(f"Q is {type_name(query)} and {name} {type_name(other)}; there is no kernel", node)


@rule(
    "cache-form",
    "TensorScatter along another axis, of another rank or type",
    fix="keep the cache as (batch, heads, length, head size), and write with axis=-2",
)
def cache_form(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in operators(model, "TensorScatter"):
        cache = input_at(node, 0)
        dims = dims_of(cache)
        dtype = type_of(cache)
        axis = attribute(node, "axis", -2)
        if dims is not None and len(dims) != 4:
            yield Hit(f"the cache has {len(dims)} axes, not batch, heads, length and head size", node)
        elif axis not in (-2, LENGTH_AXIS):
            yield Hit(f"axis is {axis}; the parser writes along -2 only, of batch, heads, length, size", node)
        if dtype is not None and dtype not in CACHE_TYPES:
            yield Hit(f"the cache is {type_name(dtype)}; it can be float, float16 or bfloat16", node)


@rule(
    "cache-length",
    "a cache of TensorScatter whose length is no number",
    fix="make the length of the cache a number before parsing, or build with `planforge build`",
)
def cache_length(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in operators(model, "TensorScatter"):
        dims = dims_of(input_at(node, 0))
        length = dims[LENGTH_AXIS] if dims is not None and len(dims) == 4 else 0
        if length == SLOTS and model.in_bundle:
            continue  # what `planforge build` will make a number
        if length == SLOTS:
            what = f"the length of the cache is {SLOTS!r}, which only `planforge build` makes a number"
            yield Hit(what, node, severity="warning")
        elif not isinstance(length, int):
            yield Hit(f"the length of the cache is {length!r}, not a number", node)


@rule(
    "cache-binding",
    "a cache of TensorScatter that is no input, or an update that is no output",
    fix="make the cache an input and the update an output of the graph, with nothing between",
)
def cache_binding(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in operators(model, "TensorScatter"):
        cache = input_at(node, 0)
        updated = output_at(node, 0)
        if cache is not None and not cache.is_graph_input():
            yield Hit("its cache is computed; it must be an input of the graph", node)
        if updated is not None and not updated.is_graph_output():
            yield Hit("the updated cache stays inside; it must be an output of the graph", node)


RULES = (
    input_dropped,
    attention_past,
    attention_causal_mask,
    attention_types,
    cache_form,
    cache_length,
    cache_binding,
)
