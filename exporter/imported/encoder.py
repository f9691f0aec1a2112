"""Imported encoders: one graph without a cache.

B batch, T tokens, E hidden size, V vocabulary, C classes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...runtime.bundle.manifest import TensorSpec
from ...runtime.encode.pooling import POOLINGS
from ..errors import CheckpointError, ExportError, raise_checkpoint_errors, shorten_error
from ..tracing.recipes import Recipe, encoder
from .checkpoint import ImportedCheckpoint, Tensors
from .folder import HEADS, LAYERS, Folder
from .graph import choose_rows, simplify_graph
from .names import name_weights
from .signature import ENCODER, ENDS, POOLED, STATE_NAMES
from .unrounded import open_unrounded

if TYPE_CHECKING:
    from ...models.sentence import SentenceConfig

SPANS = dict(zip(ENDS, ("question_answering.start", "question_answering.end"), strict=True))
PADDING_POSITIONS = (0, 1)  # padding's position, where a model does not read it from config.json
WIDTHS = ("hidden_size", "dim", "emb_dim", "d_model")
FEED_FORWARD = ("intermediate_size", "hidden_dim", "ffn_dim")


@dataclass(frozen=True)
class EncoderConfig:
    """The settings of an encoder that recipes and the runtime need."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    heads: tuple[str, ...]  # whose logits the graph gives
    num_labels: int  # of a classification head; 0 without one
    sentence: SentenceConfig | None  # how sentence-transformers pools a text's vectors into one

    @property
    def output_heads(self) -> tuple[str, ...]:
        """Return the heads whose logits are given out."""
        return self.heads


class ImportedEncoder(ImportedCheckpoint):
    """An encoder with or without a head."""

    task = encoder.TASK
    max_rows = encoder.MAX_BATCH

    def read_graphs(self, found: Folder) -> None:
        from ...models.sentence_transformers import read_modules

        ENCODER.check(found.read, found.model)
        self.graph = found.graph
        simplify_graph(self.graph)
        with raise_checkpoint_errors():
            self.modules = read_modules(self.source.folder)
        if self.modules is not None and (others := self.modules.settings.keys() - {"sentence"}):
            raise CheckpointError(
                f"{self.source.folder} makes {min(others)} of texts, which needs an export from the weights,"
                " not an import"
            )
        sentence = self.sentence
        if sentence is None:
            return
        layers = sentence.layers[:-1] if sentence.normalize else sentence.layers
        if layers or "+".join(sentence.pooling) not in POOLINGS:
            raise CheckpointError(
                f"{self.source.folder} has the pooling {'+'.join(sentence.pooling)} with {len(layers)} layers"
                f" after it; an imported encoder supports only {', '.join(POOLINGS)}, without layers"
            )
        if not sentence.include_prompt:
            raise CheckpointError(
                f"{self.source.folder}: include_prompt=false needs an export from the weights, not an import"
            )

    def read_config(self, found: Folder) -> EncoderConfig:
        vocabulary = found.require_integer("vocabulary", ("vocab_size",))
        graph = self.graph.graph
        self.roles = {str(v.name): self.find_role(v, vocabulary) for v in graph.outputs}
        if not any(self.roles.values()):
            raise ExportError(f"{found.model} outputs none of {', '.join((*STATE_NAMES, 'logits', *ENDS))}")
        heads = [role.partition(".")[0] for role in self.roles.values() if role and role != "hidden"]
        classes = [
            v.shape[-1]
            for v in graph.outputs
            if self.roles[str(v.name)].endswith("_classification") and v.shape is not None
        ]
        width = found.require_integer("width", WIDTHS)
        return EncoderConfig(
            vocabulary,
            hidden_size=width,
            intermediate_size=found.read_integer(FEED_FORWARD) or 4 * width,
            num_attention_heads=found.require_integer("heads", HEADS),
            num_hidden_layers=found.require_integer("layers", LAYERS),
            heads=tuple(dict.fromkeys(heads)),
            num_labels=classes[0] if classes and isinstance(classes[0], int) else 0,
            sentence=self.sentence,
        )

    @property
    def sentence(self) -> SentenceConfig | None:
        """Return how sentence-transformers pools a text's vectors into one."""
        return None if self.modules is None else self.modules.sentence

    def find_role(self, value: ir.Value, vocabulary: int) -> str:
        """Return an output's role, by its name and shape; "" for one that is left out."""
        name = str(value.name)
        shape = list(value.shape or ())
        last = shape[-1] if shape and isinstance(shape[-1], int) else None
        if name in STATE_NAMES and len(shape) == 3:
            return "hidden"
        if name in POOLED:
            return ""  # the runtime pools; a pooler's vector is seldom wanted
        if name in SPANS and len(shape) == 2 and {v.name for v in self.graph.graph.outputs} >= set(SPANS):
            return SPANS[name]
        if name == "logits" and last is not None and len(shape) in (2, 3):
            by_token = "masked_lm" if last == vocabulary else "token_classification"
            return "sequence_classification" if len(shape) == 2 else by_token
        raise ExportError(
            f"{name} is not a known output (shape {shape}); expected are hidden states or logits of three"
            " axes, or of two to classify texts, the last of a fixed length, or start and end logits"
        )

    def read_context(self, found: Folder) -> int:
        """Return the most tokens that the graph takes; config.json counts positions.

        RoBERTa's and MPNet's positions begin behind that of padding, whose number MPNet never reads from
        config.json. Of padding alone such a graph takes any length, so it has to take each of two words.
        """
        context = super().read_context(found)
        pad = found.read_integer(("pad_token_id",)) or 0
        words = [(pad + distance) % self.config.vocab_size for distance in (1, 2)]
        session = open_unrounded(found.model)
        inputs = [node.name for node in session.get_inputs()]
        why = "too few"
        kept_for_padding = {0, pad + 1, *(position + 1 for position in PADDING_POSITIONS)}
        for length in sorted((context - kept for kept in kept_for_padding), reverse=True):
            if length < self.traits.min_length:
                continue
            try:
                for word in words:
                    session.run(None, make_inputs_of_one_word(inputs, word, length))
            except Exception as error:  # onnxruntime's own
                why = shorten_error(error)
            else:
                return min(length, self.read_tokenizer_length() or length)
        raise ExportError(f"{found.model} does not run with {context} tokens: {why}")

    def read_recipes(self, shared: bool) -> dict[str, Recipe]:
        """Return recipes of both dialects, which differ by operators alone."""
        axes = encoder.list_axes(self.config, self.choices)
        last = f"hidden.{self.config.num_hidden_layers}"
        outputs = [
            TensorSpec(name, last if role == "hidden" else role, "float32", axes[role])
            for name, role in self.roles.items()
            if role
        ]
        inputs = [str(value.name) for value in self.graph.graph.inputs]
        return encoder.make_both_dialects(inputs, outputs, axes, self.graph.opset_imports[""])

    def prepare_graphs(self, tensors: Tensors) -> None:
        name_weights(self.graph, tensors)
        if "masked_lm" in self.config.heads:
            choose_rows(self.graph)

    def make_graph(self, recipe: Recipe) -> ir.Model:
        return self.graph.clone()


def make_inputs_of_one_word(names: Sequence[str], word: int, length: int) -> dict[str, npt.NDArray[np.int64]]:
    """Return a graph's inputs (1, T) for a sequence that repeats one word's id."""
    ids = np.full((1, length), word, np.int64)
    by_role = {"ids": ids, "mask": np.ones_like(ids), "segments": np.zeros_like(ids)}
    return {name: by_role[encoder.ROLES[name]] for name in names}
