"""Gives the two graphs of an encoder-decoder the inputs and outputs of Hugging Face's graphs.

B batch, S source tokens, P and T cached and new target tokens, H heads, D head size, L layers, V vocabulary

Our encoder returns the keys and values of the decoder's cross-attention; theirs returns one state of each
token, which they hand to every step unread. So the keys and values of all layers, side by side, are that
state: (B, S, 2 * L * H * D).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ...runtime.bundle.artifact import TOTAL, Artifact
from ...runtime.bundle.manifest import Manifest
from ..passes.build import Builder
from .graphs import (
    PREFIX,
    find_value,
    give_logits_an_axis,
    name_cache_as_hugging_face,
    rename_axes,
    replace_input,
)
from .hugging_face import count_layers, describe_special_tokens, read_vocabulary_size

STATES = "encoder_hidden_states"  # the decoder's input
HEADS_LAST = (0, 2, 1, 3)  # (B, H, S, D) and (B, S, H, D), either way


def join_cross_attention(graph: ir.Graph) -> None:
    """Return an encoder's keys and values as one last_hidden_state (B, S, 2 * L * H * D)."""
    add = Builder(graph, None, PREFIX)
    crosses = [value for value in graph.outputs if str(value.name).startswith("cross.")]
    parts = []
    for cross in crosses:
        by_token = add("Transpose", cross, perm=HEADS_LAST)  # (B, S, H, D)
        parts.append(add("Reshape", by_token, np.array([0, 0, -1])))  # (B, S, H * D)
    states = add("Concat", *parts, axis=-1)
    states.name = "last_hidden_state"
    states.type = crosses[0].type
    states.shape = ir.Shape(["batch_size", "encoder_sequence_length", count_numbers(crosses)])
    graph.outputs.clear()
    graph.outputs.append(states)
    rename_axes(graph.inputs, {"batch": "batch_size", "tokens": "encoder_sequence_length"})


def count_numbers(crosses: list[ir.Value]) -> int:
    """Return how many numbers one source token has in all keys and values."""
    total = 0
    for cross in crosses:
        assert cross.shape is not None
        heads, head_size = cross.shape[1], cross.shape[3]
        assert isinstance(heads, int) and isinstance(head_size, int)
        total += heads * head_size
    return total


def split_cross_attention(graph: ir.Graph) -> None:
    """Let a decoder read its keys and values from encoder_hidden_states, where the encoder joined them."""
    add = Builder(graph, graph[0], PREFIX)
    crosses = [value for value in graph.inputs if str(value.name).startswith("cross.")]
    shape = ir.Shape(["batch_size", "encoder_sequence_length", count_numbers(crosses)])
    states = ir.Value(name=STATES, shape=shape, type=crosses[0].type)
    graph.inputs.insert(1, states)
    sizes = [count_numbers([cross]) for cross in crosses]
    parts = add.add("Split", states, np.array(sizes), results=len(crosses), axis=-1).outputs
    for cross, part in zip(crosses, parts, strict=True):
        assert cross.shape is not None
        heads = add("Reshape", part, np.array([0, 0, cross.shape[1], cross.shape[3]]))  # (B, S, H, D)
        replace_input(graph, str(cross.name), add("Transpose", heads, perm=HEADS_LAST))


def take_cache_as_it_is(graph: ir.Graph, artifact: Artifact) -> None:
    """Derive past lengths and logit rows from shapes: targets are not padded. Logits become (B, 1, V)."""
    add = Builder(graph, graph[0], PREFIX)
    ids = graph.inputs[0]
    cache = find_value(graph.inputs, artifact.input("past.0.key").name)
    batch = add("Shape", ids, start=0, end=1)
    length = add("Shape", ids, start=1, end=2)
    width = add("Shape", cache, start=2, end=3)
    past = add("Cast", width, to=ir.DataType.INT32)
    replace_input(graph, "past_lengths", add("Expand", past, batch))
    # Of shapes, so that a GPU's attention finds it on the host.
    total = add("Squeeze", add("Add", width, length))
    replace_input(graph, TOTAL, add("Cast", total, to=ir.DataType.INT32))
    numbers = add("Range", 1, add("Add", add("Squeeze", batch), 1), 1)  # (B,) from 1
    replace_input(graph, "logit_rows", add("Sub", add("Mul", numbers, length), 1))
    give_logits_an_axis(graph, batch, 1)


def convert_decoder(graph: ir.Graph, artifact: Artifact) -> None:
    """Give a decoder the inputs and outputs of decoder_model_merged.onnx."""
    take_cache_as_it_is(graph, artifact)
    split_cross_attention(graph)
    name_cache_as_hugging_face(graph, count_layers(artifact), "decoder.")
    rename_axes(graph.inputs, {"sources": "batch_size", "source_tokens": "encoder_sequence_length"})


def describe_translator(manifest: Manifest, decoder: Artifact) -> dict[str, Any]:
    """Return config.json of an encoder-decoder, which is called a MarianMT: it has the same inputs."""
    heads, head_size = (axis for axis in decoder.input("past.0.key").axes if isinstance(axis, int))
    layers = count_layers(decoder)
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "vocab_size": read_vocabulary_size(decoder),
        "d_model": heads * head_size,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "max_position_embeddings": manifest.max_length,
        **describe_special_tokens(manifest),
    }
