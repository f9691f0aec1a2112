"""Imported encoder-decoders: optimum's three graphs, or two, become an encoder and a decoder.

L the context's length, H heads
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
from onnx_ir.passes import common

from ..checkpoints.checkpoint import LEAST_LENGTH
from ..checkpoints.tokenizers.files import read_settings
from ..errors import ExportError
from ..passes.weights import MICROSOFT, add_initializer
from ..tracing.recipes import Recipe, transformer
from ..tracing.recipes.recipe import HEAD_SIZES, by_id
from .attention import Attention, find_self_attention, find_source_attention
from .branches import SWITCH, choose_branch
from .build import Array, Builder
from .checkpoint import ImportedCheckpoint, Tensors
from .cross_attention import add_projections, add_source_mask, find_projections, write_source_attention
from .distances import add_distance_bias, compute_distance_tables, tabulate_distances
from .folder import LENGTHS, Folder, read_graph
from .graph import Heads, add_input, choose_rows, read_heads, read_vocab_size, simplify_graph
from .growing_cache import add_growing_mask, write_growing_attention
from .names import name_weights
from .positions import use_positions
from .shapes import fold_shapes
from .shared_buffers import add_past_lengths, check_caches, write_shared_attention
from .signature import FIRST_STEP, LATER_STEP, SOURCE_ENCODER, set_signature

USUAL_LENGTH = 512  # for a model without positions whose files give no length, such as T5
NO_LIMIT = 10**20  # transformers writes 1e30 for a tokenizer without a length
SOURCE_MASK = "encoder_attention_mask"


@dataclass(frozen=True)
class TranslatorConfig:
    """The settings of an encoder-decoder that recipes and the runtime need."""

    decoder_layers: int
    decoder_heads: int
    decoder_head_size: int
    source_vocab_size: int
    target_vocab_size: int
    max_positions: int

    @property
    def vocab_size(self) -> int:
        return self.target_vocab_size


class ImportedTranslator(ImportedCheckpoint):
    """An encoder-decoder."""

    task = transformer.TASK
    most_rows = transformer.MAX_BATCH

    def read_graphs(self, found: Folder) -> None:
        assert found.encoder is not None
        self.source_graph = read_graph(found.encoder)
        SOURCE_ENCODER.check(self.source_graph, found.encoder)
        LATER_STEP.check(found.read, found.model)
        self.graph = found.graph
        if found.first is None:
            first = self.graph.clone()
            choose_branch(first, SWITCH, "else_branch")
            choose_branch(self.graph, SWITCH, "then_branch")
        else:
            first = read_graph(found.first)
            FIRST_STEP.check(first, found.first)
        for model in (self.source_graph, self.graph, first):
            simplify_graph(model)
        given = find_projections(first)
        add_projections(self.source_graph, given)
        rename_caches(self.graph)
        wanted = {str(v.name) for v in self.graph.graph.inputs if str(v.name).startswith("cross.")}
        if wanted != {each.name for each in given}:
            raise ExportError(
                f"{found.model} reads the source's keys and values of {len(wanted) // 2} layers, and of"
                f" {len(given) // 2} the first step projects them"
            )
        self.heads = read_heads(self.graph)
        layers = find_self_attentions(self.graph.graph, self.heads)
        biases = [bias for attention in layers for bias in attention.biases]
        positions = add_input(self.graph.graph, "position_ids", ["batch", "tokens"])
        self.has_positions = use_positions(self.graph, positions, biases)
        self.opset = self.graph.opset_imports[""]

    def read_config(self, found: Folder) -> TranslatorConfig:
        logits = next(value for value in self.graph.graph.outputs if value.name == "logits")
        vocabulary = read_vocab_size(logits)
        heads = self.heads
        return TranslatorConfig(
            heads.layers, heads.cached, heads.size, vocabulary, vocabulary, self.context_of(found)
        )

    def context_of(self, found: Folder) -> int:
        length = read_settings(self.folder).get("model_max_length")
        if type(length) is not int or not LEAST_LENGTH[self.task] <= length < NO_LIMIT:
            length = USUAL_LENGTH
        return found.read_integer(LENGTHS) or length

    def read_recipes(self, shared: bool) -> dict[str, Recipe]:
        config = self.config
        choices = self.choices
        decoders = [transformer.make_portable_recipe(config, choices)]
        if shared and self.heads.size % HEAD_SIZES == 0:
            decoders.append(transformer.make_ort_recipe(config, choices))
        encoders = [transformer.make_encoder_recipe(config, choices, decoder.dialect) for decoder in decoders]
        made = [replace(encoder, opset=self.source_graph.opset_imports[""]) for encoder in encoders]
        for decoder in decoders:
            inputs = tuple(s for s in decoder.inputs if s.role != "positions" or self.has_positions)
            made.append(replace(decoder, inputs=inputs, opset=self.opset))
        return by_id(*made)

    def graphs(self, wanted: set[str], tensors: Tensors) -> dict[str, ir.Model]:
        ids = next(value for value in self.source_graph.graph.inputs if value.name == "input_ids")
        tabulate_distances(self.source_graph, ids, self.config.max_positions)
        found = find_self_attentions(self.graph.graph, self.heads)
        tables = compute_distance_tables(self.graph, found, self.config.max_positions)
        for model in (self.source_graph, self.graph):
            name_weights(model, tensors)
        choose_rows(self.graph)
        made = {}
        for name in sorted(wanted):
            recipe = self.recipes[name]
            if recipe.graph == "encoder":
                made[name] = self.source_graph.clone()
            else:
                shared = recipe.dialect == "ort"
                made[name] = rewrite_attention(self.graph, self.heads, tables, shared)
            set_signature(made[name], recipe.inputs, recipe.outputs)
            if recipe.graph != "encoder" and recipe.dialect == "ort":
                fold_shapes(made[name])
        return made


def find_self_attentions(graph: ir.Graph, heads: Heads) -> list[Attention]:
    """Return each layer's attention over its own cache."""
    inputs = {str(value.name): value for value in graph.inputs}
    return [find_self_attention(graph, inputs, layer, heads.size) for layer in range(heads.layers)]


def rewrite_attention(
    decoder: ir.Model, heads: Heads, tables: Sequence[Array | None], shared: bool
) -> ir.Model:
    """Return a decoder's step with rewritten attention.

    Args:
        tables: each layer's biases by distance, (L, H).
        shared: whether attention is over shared buffers.
    """
    model = decoder.clone()
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    ids = inputs["input_ids"]
    first = graph[0]
    found = find_self_attentions(graph, heads)
    over_source = [find_source_attention(inputs, layer, heads.size) for layer in range(heads.layers)]
    if shared:
        rows = add_past_lengths(graph, ids)
        ir.convenience.replace_all_uses_with(inputs["position_ids"], rows.positions)
        graph.inputs.remove(inputs["position_ids"])
    op = Builder(graph, first, "masks")
    if shared:
        slots = op("Range", op.constant(0), op("Cast", rows.total, to=ir.DataType.INT64), op.constant(1))
        mask = None
        behind = op("Sub", op("Unsqueeze", rows.positions, op.constant([2])), slots)
    else:
        own = inputs.get("attention_mask") or add_input(graph, "attention_mask", ["batch", "total"])
        mask, behind = add_growing_mask(op, ids, own)
    biases: dict[bytes, ir.Value | None] = {}
    for layer, (attention, table) in enumerate(zip(found, tables, strict=True)):
        key = b"" if table is None else table.tobytes()
        if key not in biases:
            biases[key] = add_bias(op, mask, behind, table, f"distances.{layer}")
        if shared:
            past = [inputs[f"past_key_values.{layer}.{kind}"] for kind in ("key", "value")]
            write_shared_attention(graph, attention, past, rows, heads, heads.cached, biases[key])
        elif (bias := biases[key]) is not None:
            write_growing_attention(graph, attention, bias)
    seen = add_source_mask(op, inputs[SOURCE_MASK])
    for attention in over_source:
        write_source_attention(graph, attention, seen, ids, heads)
    if shared:
        model.opset_imports.setdefault(MICROSOFT, 1)
    common.RemoveUnusedNodesPass()(model)
    check_caches(graph)
    return model


def add_bias(
    op: Builder, mask: ir.Value | None, behind: ir.Value, table: Array | None, name: str
) -> ir.Value | None:
    """Return the sum of a layer's mask and biases."""
    if table is None:
        return mask
    bias = add_distance_bias(op, add_initializer(op.graph, name, ir.tensor(table)), behind)
    return bias if mask is None else op("Add", mask, bias)


def rename_caches(model: ir.Model) -> None:
    """Rename an encoder-decoder's caches: a decoder's names for its own, cross.0.key for the source's."""
    graph = model.graph
    for value in [value for value in graph.inputs if not value.uses()]:
        graph.inputs.remove(value)
    for value in [value for value in graph.outputs if ".encoder." in str(value.name)]:
        graph.outputs.remove(value)
    for value in (*graph.inputs, *graph.outputs):
        name = re.sub(r"\.decoder\.(key|value)$", r".\1", str(value.name))
        value.name = re.sub(r"^past_key_values\.(\d+)\.encoder\.(key|value)$", r"cross.\1.\2", name)
