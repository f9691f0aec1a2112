"""Imported encoder-decoders: two graphs, or optimum's three, become an encoder and a decoder.

L the context's length, H heads
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ...runtime.backends.backend import Array
from ..errors import ExportError
from ..passes.build import Builder
from ..passes.weights import MICROSOFT
from ..tracing.recipes import Recipe, transformer
from ..tracing.recipes.recipe import HEAD_SIZES, index_recipes
from .attention import find_self_attentions, find_source_attentions
from .branches import choose_branch
from .checkpoint import ImportedCheckpoint, Tensors
from .distances import add_distance_bias, compute_distance_tables, tabulate_distances
from .evaluate import drop_unused_inputs
from .folder import LENGTHS, TRANSFORMERS, Folder
from .graph import Heads, add_input, choose_rows, read_heads, read_vocab_size, simplify_graph
from .names import name_weights
from .plain_attention import (
    CROSS,
    add_growing_mask,
    add_projections,
    add_source_mask,
    find_projections,
    write_growing_attention,
    write_source_attention,
)
from .positions import use_positions
from .shared_buffers import add_past_lengths, check_caches, write_shared_attention
from .signature import FIRST_STEP, LATER_STEP, SOURCE_ENCODER, WHOLE_ENCODER

USUAL_LENGTH = 512  # for a model without positions whose files give no length, such as T5


@dataclass(frozen=True)
class TranslatorConfig:
    """The settings of an encoder-decoder that recipes and the runtime need."""

    decoder_layers: int
    decoder_heads: int
    decoder_head_size: int
    source_vocab_size: int
    target_vocab_size: int
    max_positions: int
    target_positions: bool = True  # other exporters' graphs are given positions, if they read them or not

    @property
    def cross_layers(self) -> int:
        """Return how many keys and values a source has."""
        return self.decoder_layers

    @property
    def vocab_size(self) -> int:
        return self.target_vocab_size


class ImportedTranslator(ImportedCheckpoint):
    """An encoder-decoder."""

    task = transformer.TASK
    max_rows = transformer.MAX_BATCH

    def read_graphs(self, found: Folder) -> None:
        LATER_STEP.check(found.read, found.model)
        self.graph = found.graph
        if found.exporter == TRANSFORMERS:
            self.read_whole_encoder(found)
        else:
            self.read_encoder_and_first_step(found)
        rename_caches(self.graph.graph)
        wanted = {str(v.name) for v in self.graph.graph.inputs if str(v.name).startswith("cross.")}
        given = {str(v.name) for v in self.source_graph.graph.outputs}
        if wanted != given:
            raise ExportError(
                f"{found.model} reads the source's keys and values of {len(wanted) // 2} layers, but those of"
                f" {len(given) // 2} are computed"
            )
        self.heads = read_heads(self.graph)
        layers = find_self_attentions(self.graph.graph, self.heads)
        biases = [bias for attention in layers for bias in attention.biases]
        positions = add_input(self.graph.graph, "position_ids", ["batch", "tokens"])
        self.has_positions = use_positions(self.graph, positions, biases)

    def read_whole_encoder(self, found: Folder) -> None:
        """Read an encoder that gives keys and values of every layer."""
        assert found.encoder is not None
        self.source_graph = found.graphs[found.encoder].clone()
        WHOLE_ENCODER.check(self.source_graph, found.encoder)
        for model in (self.source_graph, self.graph):
            simplify_graph(model)
        for value in self.source_graph.graph.outputs:
            value.name = CROSS.sub(r"cross.\1.\2", str(value.name))

    def read_encoder_and_first_step(self, found: Folder) -> None:
        """Read an encoder that gives its states, and add what the decoder's first step makes of them."""
        assert found.encoder is not None
        self.source_graph = found.graphs[found.encoder].clone()
        SOURCE_ENCODER.check(self.source_graph, found.encoder)
        if found.first is None:
            first = self.graph.clone()
            choose_branch(first, "else_branch")
            choose_branch(self.graph, "then_branch")
        else:
            first = found.graphs[found.first].clone()
            FIRST_STEP.check(first, found.first)
        for model in (self.source_graph, self.graph, first):
            simplify_graph(model)
        add_projections(self.source_graph, find_projections(first))

    def read_config(self, found: Folder) -> TranslatorConfig:
        vocabulary = read_vocab_size(self.graph)
        heads = self.heads
        context = self.read_context(found)
        return TranslatorConfig(heads.layers, heads.cached, heads.size, vocabulary, vocabulary, context)

    def read_context(self, found: Folder) -> int:
        return found.read_integer(LENGTHS) or self.read_tokenizer_length() or USUAL_LENGTH

    def read_recipes(self, shared: bool) -> dict[str, Recipe]:
        config = self.config
        choices = self.choices
        decoders = [transformer.make_decoder(config, choices, "portable")]
        if shared and self.heads.size % HEAD_SIZES == 0:
            decoders.append(transformer.make_decoder(config, choices, "ort"))
        opset = self.source_graph.opset_imports[""]
        encoder = replace(transformer.make_encoder(config, choices), opset=opset)
        made = [replace(encoder, dialect=decoder.dialect) for decoder in decoders]
        for decoder in decoders:
            inputs = tuple(s for s in decoder.inputs if s.role != "positions" or self.has_positions)
            made.append(replace(decoder, inputs=inputs, opset=self.graph.opset_imports[""]))
        return index_recipes(made)

    def prepare_graphs(self, tensors: Tensors) -> None:
        ids = next(value for value in self.source_graph.graph.inputs if value.name == "input_ids")
        tabulate_distances(self.source_graph, ids, self.config.max_positions)
        found = find_self_attentions(self.graph.graph, self.heads)
        self.tables = compute_distance_tables(self.graph, found, self.config.max_positions)
        for model in (self.source_graph, self.graph):
            name_weights(model, tensors)
        choose_rows(self.graph)

    def make_graph(self, recipe: Recipe) -> ir.Model:
        if not recipe.keeps_cache:
            return self.source_graph.clone()
        made = self.graph.clone()
        rewrite_attention(made, self.heads, self.tables, recipe.dialect == "ort")
        return made


def rewrite_attention(model: ir.Model, heads: Heads, tables: list[Array | None], shared: bool) -> None:
    """Rewrite the attention of a decoder's step, over shared buffers or a growing cache."""
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    ids = inputs["input_ids"]
    op = Builder(graph, graph[0], "masks")
    found = find_self_attentions(graph, heads)
    over_source = find_source_attentions(graph, heads)
    mask: ir.Value | None = None
    if shared:
        rows = add_past_lengths(graph, ids)
        one = np.array(1, np.int32)
        slots = op("Cast", op("Range", np.array(0, np.int32), rows.total, one), to=ir.DataType.INT64)
        behind = op("Sub", op("Unsqueeze", rows.positions, [2]), slots)
    else:
        own = inputs.get("attention_mask") or add_input(graph, "attention_mask", ["batch", "total"])
        mask, behind = add_growing_mask(op, ids, own)
    biases: dict[bytes, ir.Value | None] = {}
    for layer, (attention, table) in enumerate(zip(found, tables, strict=True)):
        key = b"" if table is None else table.tobytes()
        if key not in biases:
            biases[key] = add_distance_bias(op, mask, behind, table, f"distances.{layer}")
        if shared:
            write_shared_attention(graph, attention, rows, heads, heads.cached, biases[key])
        elif (bias := biases[key]) is not None:
            write_growing_attention(graph, attention, bias)
    seen = add_source_mask(op, inputs["encoder_attention_mask"])
    for attention in over_source:
        write_source_attention(graph, attention, seen, ids, heads)
    if shared:
        model.opset_imports.setdefault(MICROSOFT, 1)
    common.RemoveUnusedNodesPass()(model)
    check_caches(graph)


def rename_caches(graph: ir.Graph) -> None:
    """Rename an encoder-decoder's caches: a decoder's names for its own, cross.0.key for the source's."""
    drop_unused_inputs(graph)
    for value in [value for value in graph.outputs if ".encoder." in str(value.name)]:
        graph.outputs.remove(value)
    for value in (*graph.inputs, *graph.outputs):
        name = re.sub(r"\.decoder\.(key|value)$", r".\1", str(value.name))
        value.name = re.sub(r"^past_key_values\.(\d+)\.encoder\.(key|value)$", r"cross.\1.\2", name)
