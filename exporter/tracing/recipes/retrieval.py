"""The graphs of a decoder that reads neighbours: its step, and the encoder of a chunk's neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ....runtime.bundle.manifest import Axis, TensorSpec
from ....runtime.errors import InputError
from ...task_traits import RETRIEVAL
from .recipe import (
    DecoderParts,
    Recipe,
    TraceOptions,
    index_recipes,
    list_decoder_dialects,
    make_cache_specs,
    make_decoder_recipe,
    wrap_model,
)

if TYPE_CHECKING:
    from ....models import RetroConfig

TASK = RETRIEVAL.name
MAX_BATCH = 8  # where an export names none
PARTS = "retrieval"  # the module of `tracing` that has them
MODULES = {
    "portable": "PortableRetrieval",
    "inplace": "InplaceRetrieval",
    "ort": "OrtRetrieval",
}
EXAMPLE = {"batch": 2, "tokens": 3, "past": 5, "total": 8, "slots": 11, "rows": 4}


def read_context(config: RetroConfig) -> int:
    """Return the most tokens that the model takes."""
    return config.context


def make_recipes(config: RetroConfig, choices: TraceOptions) -> dict[str, Recipe]:
    if choices.outputs:
        raise InputError(f"outputs {list(choices.outputs)}: a decoder that reads neighbours has none to add")
    if choices.max_length < 2 * config.chunk_length:
        raise InputError(
            f"max_length={choices.max_length} must be at least {2 * config.chunk_length}, two chunks of"
            f" {config.chunk_length} tokens: in less the model would read no neighbours"
        )
    batch = Axis("batch", 1, 1, choices.max_batch)
    encoder = make_encoder(config, batch)
    dialects = list_decoder_dialects(config.head_size)
    decoders = [make_decoder(config, choices.max_length, batch, dialect) for dialect in dialects]
    return index_recipes((encoder, replace(encoder, dialect="ort"), *decoders))


def make_encoder(config: RetroConfig, batch: Axis) -> Recipe:
    """Make the recipe of the encoder, which reads all neighbours of a chunk for each row."""
    read = (batch, config.neighbours * config.neighbour_length)
    chunk = (batch, config.chunk_length, config.hidden_size)
    return Recipe(
        graph="encoder",
        dialect="portable",
        opset=20,
        padding_side="right",
        module=wrap_model("NeighbourEncoder", home=PARTS),
        inputs=(
            TensorSpec("neighbour_ids", "neighbours", "int64", read),
            TensorSpec("neighbour_mask", "neighbour_mask", "int64", read),
            TensorSpec("chunk", "chunk", "float32", chunk),
        ),
        outputs=make_cross_specs(config, batch),
        example={"batch": 2},
    )


def make_decoder(config: RetroConfig, length: int, batch: Axis, dialect: str) -> Recipe:
    """Make the recipe of the decoder in a dialect; a step ends with a chunk at the latest."""
    layers, heads, head_size = config.cache_sizes
    tokens = Axis("tokens", 1, min(config.chunk_length, length), length)
    mask = TensorSpec(
        "neighbour_mask", "source_mask", "int64", (batch, config.neighbours * config.neighbour_length)
    )
    parts = DecoderParts(
        layers=layers,
        heads=heads,
        head_size=head_size,
        vocab_size=config.vocab_size,
        batch=batch,
        tokens=tokens,
        usual_tokens=config.chunk_length,
        modules=MODULES,
        example=EXAMPLE,
        inputs=(mask, *make_cross_specs(config, batch)),
        outputs=(TensorSpec("chunk", "chunk", "float32", (batch, tokens, config.hidden_size)),),
    )
    recipe = make_decoder_recipe(parts, dialect)
    return replace(recipe, module=wrap_model(MODULES[dialect], home=PARTS))


def make_cross_specs(config: RetroConfig, batch: Axis) -> tuple[TensorSpec, ...]:
    """Return the keys and values of neighbours, of each layer that reads them."""
    axes = (batch, config.num_attention_heads, config.neighbours * config.neighbour_length, config.head_size)
    return make_cache_specs("cross", "cross", len(config.cross_layers), axes)
