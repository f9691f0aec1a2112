"""The recipe of word vectors: one graph looks words up, and finds those that are nearest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....runtime.bundle.manifest import Axis, TensorSpec
from .recipe import Recipe, TraceOptions, index_recipes

if TYPE_CHECKING:
    from torch import nn

    from ....models.word_vectors import WordVectorsConfig

TASK = "word-vectors"
MAX_BATCH = 32
OPSET = 20
MOST_WORDS = 64  # of a question


def read_context(config: WordVectorsConfig) -> int:
    """Return the most words of a question."""
    return MOST_WORDS


def make_recipes(config: WordVectorsConfig, choices: TraceOptions) -> dict[str, Recipe]:
    """Return the recipes of the graph, in both dialects."""
    batch = Axis("batch", 1, 1, choices.max_batch)
    tokens = Axis("tokens", 1, min(3, choices.max_length), choices.max_length)  # an analogy has three words
    return index_recipes(
        Recipe(
            graph="words",
            dialect=dialect,
            opset=OPSET,
            padding_side="right",
            module=wrap_words,
            inputs=(
                TensorSpec("input_ids", "ids", "int64", (batch, tokens)),
                TensorSpec("signs", "signs", "float32", (batch, tokens)),
            ),
            outputs=(
                TensorSpec("vectors", "vectors", "float32", (batch, tokens, config.hidden_size)),
                TensorSpec("similarity", "similarity", "float32", (batch, config.neighbours)),
                TensorSpec("nearest", "nearest", "int64", (batch, config.neighbours)),
            ),
            example={"batch": 2, "tokens": 7},
        )
        for dialect in ("portable", "ort")
    )


def wrap_words(model: Any) -> nn.Module:
    """Return the module that is traced, imported late as it loads torch."""
    from ..word_parts import Words

    return Words(model)
