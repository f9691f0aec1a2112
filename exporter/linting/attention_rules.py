"""Rules about Attention and its cache."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ...runtime.bundle.artifact import SLOTS
from ..targets import Target
from .model import (
    LintModel,
    dims_of,
    find_input,
    find_output,
    has_input,
    name_type,
    read_attribute,
    type_of,
)
from .operator_tables import WINDOWS
from .rule import Hit, make_rule

# Inputs of Attention. Values come from a cache only.
MASK = 3
PAST = {4: "past_key", 5: "past_value"}
LENGTHS = 6
LENGTH_AXIS = 2  # of a cache (batch, heads, length, head size)
CACHE_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@make_rule(
    "what the parser passes over in silence: Attention's nonpad_kv_seqlen and windows",
    fix="write it into attn_mask",
    severity="wrong",
)
def check_input_dropped(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.find_nodes("Attention"):
        if has_input(node, LENGTHS):
            yield Hit("the parser passes over the input nonpad_kv_seqlen: no key is left out", node)
        for name in WINDOWS if target.engine == "tensorrt-rtx" else ():
            value = read_attribute(node, name, -1)
            if value != -1:
                yield Hit(f"the parser passes over the attribute {name} = {value}: no key is left out", node)


@make_rule(
    "a past inside Attention",
    fix="Concat past and new keys before Attention, or write them into slots with TensorScatter",
)
def check_attention_past(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.find_nodes("Attention"):
        given = [name for index, name in PAST.items() if has_input(node, index)]
        if given:
            yield Hit(f"the parser refuses the inputs {' and '.join(given)}", node)


@make_rule("both is_causal and a mask", fix="write both into attn_mask")
def check_attention_causal_mask(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.find_nodes("Attention"):
        if read_attribute(node, "is_causal", 0) and has_input(node, MASK):
            yield Hit("is_causal and attn_mask exclude each other", node)


@make_rule("V or a mask of another type than Q", fix="Cast it to the type of Q")
def check_attention_types(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.find_nodes("Attention"):
        query = type_of(find_input(node, 0))
        for index, name in ((2, "V"), (MASK, "attn_mask")):
            other = type_of(find_input(node, index))
            if query is not None and other is not None and other not in (query, ir.DataType.BOOL):
                yield Hit(f"Q is {name_type(query)} and {name} {name_type(other)}; there is no kernel", node)


@make_rule(
    "TensorScatter along another axis, of another rank or type",
    fix="keep the cache as (batch, heads, length, head size), and write with axis=-2",
)
def check_cache_form(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.find_nodes("TensorScatter"):
        cache = find_input(node, 0)
        dims = dims_of(cache)
        dtype = type_of(cache)
        axis = read_attribute(node, "axis", -2)
        if dims is not None and len(dims) != 4:
            yield Hit(f"the cache has {len(dims)} axes, not batch, heads, length and head size", node)
        elif axis not in (-2, LENGTH_AXIS):
            yield Hit(f"axis is {axis}; the parser writes along -2 only, of batch, heads, length, size", node)
        if dtype is not None and dtype not in CACHE_TYPES:
            yield Hit(f"the cache is {name_type(dtype)}; it can be float, float16 or bfloat16", node)


@make_rule(
    "a cache of TensorScatter whose length is not a number",
    fix="make the length of the cache a number before parsing, or build with `planforge build`",
)
def check_cache_length(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.find_nodes("TensorScatter"):
        dims = dims_of(find_input(node, 0))
        length = dims[LENGTH_AXIS] if dims is not None and len(dims) == 4 else 0
        if length == SLOTS and not model.in_bundle:
            what = f"the length of the cache is {SLOTS!r}, which only `planforge build` makes a number"
            yield Hit(what, node)
        elif length != SLOTS and not isinstance(length, int):
            yield Hit(f"the length of the cache is {length!r}, not a number", node)


@make_rule(
    "a cache of TensorScatter that is not an input, or an update that is not an output",
    fix="make the cache an input and the update an output of the graph, with nothing between",
)
def check_cache_binding(model: LintModel, target: Target) -> Iterator[Hit]:
    for node in model.find_nodes("TensorScatter"):
        cache = find_input(node, 0)
        updated = find_output(node, 0)
        if cache is not None and not cache.is_graph_input():
            yield Hit("its cache is computed; it must be an input of the graph", node)
        if updated is not None and not updated.is_graph_output():
            yield Hit("the updated cache stays inside; it must be an output of the graph", node)
