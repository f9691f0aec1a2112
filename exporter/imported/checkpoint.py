"""A checkpoint whose graphs optimum makes: what its files say of graphs and tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...runtime.errors import InputError
from ..checkpoint import Checkpoint
from ..errors import CheckpointError, ExportError
from ..recipes import Choices, Recipe, gpt2
from ..recipes.recipe import HEAD_SIZES
from ..source import Source
from .decoder_graph import choose_rows, heads_of, simplified, vocabulary_of, with_signature
from .folder import HEADS, LENGTHS, Folder, load_graph, read_folder
from .names import name_weights
from .shared_buffers import share_buffers

log = logging.getLogger("planforge")


@dataclass(frozen=True)
class DecoderConfig:
    """What recipes and the runtime ask of a decoder.

    Attributes:
        n_head: of keys and values, as they are cached.
        query_heads: None where config.json does not say.
    """

    n_layer: int
    n_head: int
    head_size: int
    vocab_size: int
    n_positions: int
    query_heads: int | None


class ImportedCheckpoint(Checkpoint):
    """A decoder in a folder that optimum wrote.

    Args:
        source: whose weights transformers can read.
        folder: that optimum wrote.
        shared: try attention over shared buffers.

    Raises:
        CheckpointError, ExportError: the folder cannot be used; says why.
        InputError: a choice that the model does not allow.
    """

    exporter = "optimum"

    def __init__(
        self,
        source: Source,
        folder: Path,
        max_batch: int | None = None,
        max_length: int | None = None,
        shared: bool = True,
    ) -> None:
        self.begin(source)
        found = read_folder(folder)
        self.folder, self.config_json, self.task = folder, dict(found.config), gpt2.TASK
        self.family = str(found.config.get("model_type"))
        self.graph = load_graph(found)
        simplified(self.graph)
        self.heads = heads_of(self.graph)
        self.config = self.read_config(found)
        context = self.config.n_positions
        if max_length is not None and not 2 <= max_length <= context:
            raise InputError(f"max_length={max_length} must be from 2 to the model's context of {context}")
        self.choices = Choices(max_batch or gpt2.MAX_BATCH, max_length or context)
        self.opset = self.graph.opset_imports[""]
        self.recipes = self.read_recipes(shared)
        self.read_tokenizers()
        self.generation, self.encoder = self.read_generation(), None

    def read_config(self, folder: Folder) -> DecoderConfig:
        context = folder.whole(LENGTHS)
        if context is None:
            raise CheckpointError(
                f"{folder.path / 'config.json'} says no length: none of {', '.join(LENGTHS)}"
            )
        logits = next(value for value in self.graph.graph.outputs if value.name == "logits")
        heads = self.heads
        vocabulary = vocabulary_of(logits)
        return DecoderConfig(
            *(heads.layers, heads.cached, heads.size, vocabulary, context),
            query_heads=folder.whole(HEADS),
        )

    def read_recipes(self, shared: bool) -> dict[str, Recipe]:
        """Of `portable`, and of `ort` where the attention can be had over shared buffers."""
        made = [gpt2.portable(self.config, self.choices)]
        if shared and self.can_share():
            made.append(gpt2.ort(self.config, self.choices))
        names = {str(value.name) for value in self.graph.graph.inputs} | {"logit_rows", "past_lengths"}
        found = {}
        for recipe in made:
            inputs = tuple(s for s in recipe.inputs if s.name in names or s.name.startswith("cache."))
            found[recipe.id] = replace(recipe, inputs=inputs, opset=self.opset)
        return found

    def can_share(self) -> bool:
        """Whether attention is of a form that is known; a warning says why not."""
        if self.heads.size % HEAD_SIZES:
            log.warning(
                "heads of %d are no multiple of %d: attention stays as it is", self.heads.size, HEAD_SIZES
            )
            return False
        if self.config.query_heads is None:
            log.warning("config.json says no number of heads: attention stays as it is")
            return False
        try:
            share_buffers(self.graph.clone(), self.heads, self.config.query_heads)
        except ExportError as error:
            log.warning("attention stays as it is: %s", error)
            return False
        return True

    def graphs(self, wanted: set[str], tensors: Mapping[str, np.ndarray]) -> dict[str, ir.Model]:
        """The recipes' graphs, with weights.

        Args:
            tensors: of the checkpoint, by name.

        Raises:
            ExportError: a graph cannot have a dialect; says why.
        """
        name_weights(self.graph, tensors)
        choose_rows(self.graph)
        made = {}
        for name in sorted(wanted):
            recipe, graph = self.recipes[name], self.graph.clone()
            renamed = {}
            if recipe.dialect == "ort":
                assert self.config.query_heads is not None
                share_buffers(graph, self.heads, self.config.query_heads)
                kinds = ("key", "value")
                renamed = {
                    f"past_key_values.{i}.{kind}": f"cache.{i}.{kind}"
                    for i in range(self.heads.layers)
                    for kind in kinds
                }
            with_signature(graph, recipe.inputs, recipe.outputs, renamed)
            made[name] = graph
        return made
