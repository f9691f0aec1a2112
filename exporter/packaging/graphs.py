"""Gives a bundle's graph the inputs, outputs and names of other runtimes; its computation stays the same.

B batch, T new tokens, P cached tokens, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from ...runtime.bundle.artifact import TOTAL, Artifact
from ...runtime.bundle.bundle import Bundle
from ..passes.build import Builder
from ..passes.weight_files import load_graph

PREFIX = "package"  # of the names of nodes that are added
LAST = np.array([-1])
ONE = np.array([1])


def read_graph(bundle: Bundle, artifact: Artifact) -> ir.Model:
    """Return the graph of an artifact, whose weights stay in the bundle's file."""
    return load_graph(bundle.path(artifact.file))


def rename_values(graph: ir.Graph, names: Mapping[str, str]) -> None:
    """Give inputs and outputs other names."""
    for value in (*graph.inputs, *graph.outputs):
        value.name = names.get(str(value.name), value.name)


def rename_axes(values: Iterable[ir.Value], names: Mapping[str, str]) -> None:
    """Give dynamic axes of some inputs or outputs other names."""
    for value in values:
        assert value.shape is not None
        axes = [
            names.get(str(axis.value), axis.value) if isinstance(axis, ir.SymbolicDim) else axis
            for axis in value.shape
        ]
        value.shape = ir.Shape(axes)


def find_value(values: Iterable[ir.Value], name: str) -> ir.Value | None:
    """Return the input or output of a name, if there is one."""
    return next((value for value in values if value.name == name), None)


def take_attention_mask(graph: ir.Graph, *, all_rows: bool) -> None:
    """Replace a decoder's past lengths and logit rows by attention_mask (B, P + T), as others pass it.

    The logits become (B, 1, V), those of each row's last token, or with `all_rows` (B, T, V) in the order of
    `input_ids`.
    """
    add = Builder(graph, graph[0], PREFIX)
    ids = graph.inputs[0]  # (B, T)
    assert ids.shape is not None
    length = add("Shape", ids, start=1, end=2)  # (1,) T
    batch = add("Shape", ids, start=0, end=1)  # (1,) B
    steps = add("Range", 0, add("Squeeze", length), 1)  # (T,)
    if find_value(graph.inputs, "past_lengths") is None:  # padded on the left, as others do
        places = steps if all_rows else add("Sub", length, 1)
    else:
        places = roll_to_the_left(graph, add, ids, length, steps, all_rows)
    starts = add("Mul", add("Unsqueeze", add("Range", 0, add("Squeeze", batch), 1), LAST), length)  # (B, 1)
    rows = add("Reshape", add("Add", starts, places), LAST)  # (B * 1,) or (B * T,)
    replace_input(graph, "logit_rows", rows)
    give_logits_an_axis(graph, batch, ids.shape[1] if all_rows else 1)


def roll_to_the_left(
    graph: ir.Graph, add: Builder, ids: ir.Value, length: ir.Value, steps: ir.Value, all_rows: bool
) -> ir.Value:
    """Let each row begin with its first token, as the graph expects padding behind the tokens.

    Returns the places (B, 1) or (B, T) of the tokens whose logits are wanted, behind the roll.
    """
    mask = make_mask_input(graph, ids)
    end = np.array([np.iinfo(np.int64).max])
    new = add("Slice", mask, add("Neg", length), end, ONE)  # (B, T)
    count = add("ReduceSum", new, ONE, keepdims=1)  # (B, 1) tokens among the new ones
    padding = add("ArgMax", new, axis=1, keepdims=1)  # (B, 1) of these, on the left
    known = add("Sub", add("ReduceSum", mask, ONE, keepdims=1), count)  # (B, 1)
    rolled = add("Mod", add("Add", steps, padding), length)  # (B, T)
    use_instead(graph, ids, add("GatherElements", ids, rolled, axis=1))
    past = add("Cast", add("Squeeze", known, ONE), to=ir.DataType.INT32)  # (B,)
    replace_input(graph, "past_lengths", past)
    # Of a shape, so that a GPU's attention finds it on the host.
    width = add("Squeeze", add("Shape", mask, start=1, end=2))
    replace_input(graph, TOTAL, add("Cast", width, to=ir.DataType.INT32))
    if all_rows:
        return add("Mod", add("Add", add("Sub", steps, padding), length), length)  # (B, T)
    return add("Sub", count, 1)


def add_position_ids(graph: ir.Graph) -> None:
    """Add an input position_ids (B, T), which some pass, though this graph derives it from the mask."""
    if find_value(graph.inputs, "position_ids") is not None:
        return
    ids = graph.inputs[0]
    positions = ir.Value(name="position_ids", shape=ids.shape, type=ids.type)
    graph.inputs.insert(2, positions)


def make_mask_input(graph: ir.Graph, ids: ir.Value) -> ir.Value:
    """Return a new input attention_mask (B, P + T) of int64, the second one."""
    assert ids.shape is not None
    shape = ir.Shape([ids.shape[0], "total"])
    mask = ir.Value(name="attention_mask", shape=shape, type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.insert(1, mask)
    return mask


def use_instead(graph: ir.Graph, before: ir.Value, after: ir.Value) -> None:
    """Let nodes read another value, except for the nodes that were added here."""
    for node, index in tuple(before.uses()):
        if not str(node.name).startswith(f"{PREFIX}_"):
            node.replace_input_with(index, after)


def replace_input(graph: ir.Graph, name: str, value: ir.Value) -> None:
    """Remove an input, and let its readers read a value instead."""
    before = find_value(graph.inputs, name)
    assert before is not None
    ir.convenience.replace_all_uses_with(before, value)
    graph.inputs.remove(before)


def give_logits_an_axis(graph: ir.Graph, batch: ir.Value, tokens: int | ir.SymbolicDim) -> None:
    """Turn the output logits (N, V) into (B, N / B, V); the axis between is `tokens` long."""
    logits = find_value(graph.outputs, "logits")
    assert logits is not None and logits.shape is not None
    ids = graph.inputs[0]
    assert ids.shape is not None
    width = logits.shape[-1]
    add = Builder(graph, None, PREFIX)
    parts = add("Reshape", logits, add("Concat", batch, LAST, np.array([width]), axis=0))
    replace_output(graph, logits, parts, ir.Shape([ids.shape[0], tokens, width]))


def replace_output(graph: ir.Graph, before: ir.Value, after: ir.Value, shape: ir.Shape) -> None:
    """Let a graph return another value under the same name."""
    after.type = before.type
    after.shape = shape
    name = before.name
    before.name = f"{PREFIX}_{name}"
    after.name = name
    graph.outputs[graph.outputs.index(before)] = after


def name_cache_as_hugging_face(graph: ir.Graph, layers: int, part: str = "") -> None:
    """Name the cache past_key_values.N.key and present.N.key, and let it grow with every step.

    `part` is "decoder." in a model that has an encoder too: past_key_values.N.decoder.key.

    What ONNX Runtime's attention does to slots, it does to a cache without room too: it makes a longer one.
    """
    pairs = [(layer, kind) for layer in range(layers) for kind in ("key", "value")]
    rename_values(graph, {f"cache.{n}.{kind}": f"past_key_values.{n}.{part}{kind}" for n, kind in pairs})
    rename_values(graph, {f"present.{n}.{kind}": f"present.{n}.{part}{kind}" for n, kind in pairs})
    batch = {"batch": "batch_size"}  # transformers.js looks for this name
    caches = [value for value in graph.inputs if str(value.name).startswith("past_key_values.")]
    presents = [value for value in graph.outputs if str(value.name).startswith("present.")]
    rename_axes(caches, {"slots": "past_sequence_length"})
    rename_axes(presents, {"slots": "total_sequence_length"})
    rename_axes((*graph.inputs, *graph.outputs), batch)
