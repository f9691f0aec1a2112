"""Imported decoders: one graph with a growing cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import onnx_ir as ir

from ...runtime.bundle.artifact import TOTAL
from ..errors import ExportError
from ..tracing.recipes import Recipe, decoder
from ..tracing.recipes.recipe import HEAD_SIZES
from .attention import find_self_attentions
from .branches import choose_branch
from .checkpoint import ImportedCheckpoint, Tensors
from .folder import HEADS, Folder
from .graph import choose_rows, read_heads, read_vocab_size, simplify_graph
from .names import name_weights
from .positions import read_positions
from .shared_buffers import share_buffers
from .signature import DECODER
from .windows import Windows, count_windows_in_tokens, measure_windows

log = logging.getLogger("planforge")


@dataclass(frozen=True)
class DecoderConfig:
    """The settings of a decoder that recipes and the runtime need."""

    n_layer: int
    n_head: int  # of keys and values, as they are cached
    head_size: int
    vocab_size: int
    n_positions: int
    query_heads: int | None  # None where config.json does not say

    @property
    def context(self) -> int:
        return self.n_positions

    @property
    def cache_sizes(self) -> tuple[int, int, int]:
        return self.n_layer, self.n_head, self.head_size

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return None for each layer: all keep all tokens, also those whose attention sees a window."""
        return (None,) * self.n_layer


class ImportedDecoder(ImportedCheckpoint):
    """A decoder that generates text."""

    task = decoder.TASK
    max_rows = decoder.MAX_BATCH

    def read_graphs(self, found: Folder) -> None:
        DECODER.check(found.read, found.model)
        self.graph = found.graph
        choose_branch(self.graph, "then_branch")
        simplify_graph(self.graph)
        self.heads = read_heads(self.graph)
        read_positions(self.graph)

    def read_config(self, found: Folder) -> DecoderConfig:
        heads = self.heads
        vocabulary = read_vocab_size(self.graph)
        context = self.read_context(found)
        queries = found.read_integer(HEADS)
        return DecoderConfig(heads.layers, heads.cached, heads.size, vocabulary, context, queries)

    def read_recipes(self, shared: bool) -> dict[str, Recipe]:
        self.read_windows()
        made = [decoder.make_decoder(self.config, self.choices, "portable")]
        if shared and self.can_share():
            made.append(decoder.make_decoder(self.config, self.choices, "ort"))
        names = {str(value.name) for value in self.graph.graph.inputs} | {"logit_rows", "past_lengths", TOTAL}
        found = {}
        for recipe in made:
            inputs = tuple(s for s in recipe.inputs if s.name in names or s.name.startswith("cache."))
            found[recipe.id] = replace(recipe, inputs=inputs, opset=self.graph.opset_imports[""])
        return found

    def read_windows(self) -> None:
        """Measure each layer's window."""
        self.windows: Windows = [None] * self.heads.layers
        try:
            found = find_self_attentions(self.graph.graph, self.heads)
            self.windows = measure_windows(self.graph, found, self.choices.max_length)
        except ExportError as error:
            self.unshared = str(error)

    def can_share(self) -> bool:
        """Tell whether attention has a known form; a warning gives the reason if not."""
        if self.heads.size % HEAD_SIZES:
            self.unshared = f"its heads of {self.heads.size} are no multiple of {HEAD_SIZES}"
        elif self.config.query_heads is None:
            self.unshared = "config.json says no number of heads"
        else:
            try:
                share_buffers(self.graph.clone(), self.heads, self.config.query_heads, self.windows)
            except ExportError as error:
                self.unshared = str(error)
        if self.unshared:
            log.warning("its own attention is kept: %s", self.unshared)
        return not self.unshared

    def prepare_graphs(self, tensors: Tensors) -> None:
        name_weights(self.graph, tensors)
        choose_rows(self.graph)

    def make_graph(self, recipe: Recipe) -> ir.Model:
        made = self.graph.clone()
        if recipe.dialect == "ort":
            share_buffers(made, self.heads, self.config.query_heads, self.windows)
        elif any(self.windows):
            found = find_self_attentions(made.graph, self.heads)
            count_windows_in_tokens(made, found, self.windows)
        return made
