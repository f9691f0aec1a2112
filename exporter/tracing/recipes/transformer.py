"""The Transformer's two graphs: the encoder, alike in two dialects, and the decoder's step in each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ....runtime.bundle.manifest import Axis, TensorSpec
from ....runtime.errors import InputError
from ...task_traits import TRANSLATION
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
    from ....models import TransformerConfig

TASK = TRANSLATION.name
MAX_BATCH = 8  # sources, where an export names none
MAX_BEAMS = 8  # rows of the decoder for each source
OPT_TOKENS = 32  # the length of a sentence that a plan is tuned for
EXAMPLE = {
    "batch": 6,
    "tokens": 2,
    "past": 5,
    "total": 7,
    "slots": 11,
    "rows": 4,
    "sources": 3,
    "source_tokens": 8,
}
MODULES = {
    "portable": "PortableTargetDecoder",
    "inplace": "InplaceTargetDecoder",
    "ort": "OrtTargetDecoder",
}
WITHOUT_POSITIONS = {"portable": "PortableTargetWithoutPositions"}  # of a target without positions
CROSS_ATTENTIONS = "cross_attentions"


def read_context(config: TransformerConfig) -> int:
    """Return the most tokens of a source, and of a target."""
    return config.max_positions


def make_recipes(config: TransformerConfig, choices: TraceOptions) -> dict[str, Recipe]:
    if unknown := set(choices.outputs) - {CROSS_ATTENTIONS}:
        raise InputError(
            f"output {sorted(unknown)[0]!r} is not {CROSS_ATTENTIONS}, the only one that can be added"
        )
    encoder = make_encoder(config, choices)
    dialects = list_decoder_dialects(config.decoder_head_size)
    decoders = [make_decoder(config, choices, dialect) for dialect in dialects]
    return index_recipes((encoder, replace(encoder, dialect="ort"), *decoders))


def make_encoder(config: TransformerConfig, choices: TraceOptions) -> Recipe:
    batch = Axis("batch", 1, 1, choices.max_batch)
    tokens = Axis("tokens", 1, min(OPT_TOKENS, choices.max_length), choices.max_length)
    return Recipe(
        graph="encoder",
        dialect="portable",
        opset=20,
        padding_side="right",
        module=wrap_model("SourceEncoder"),
        inputs=(
            TensorSpec("input_ids", "ids", "int64", (batch, tokens)),
            TensorSpec("attention_mask", "mask", "int64", (batch, tokens)),
        ),
        outputs=make_cross_specs(config, batch, tokens),
        example={"batch": 2, "tokens": 5},
    )


def make_decoder(config: TransformerConfig, choices: TraceOptions, dialect: str) -> Recipe:
    """Make the recipe of the decoder's step in a dialect; its batch is of all beams."""
    length = choices.max_length
    batch = Axis("batch", 1, 1, MAX_BEAMS * choices.max_batch)
    tokens = Axis("tokens", 1, 1, length)
    sources = Axis("sources", 1, 1, choices.max_batch)
    source_tokens = Axis("source_tokens", 1, min(OPT_TOKENS, length), length)
    source_mask = TensorSpec("encoder_attention_mask", "source_mask", "int64", (sources, source_tokens))
    gives_weights = CROSS_ATTENTIONS in choices.outputs
    weight_axes = (batch, config.decoder_heads, tokens, source_tokens)
    weights = [
        TensorSpec(f"{CROSS_ATTENTIONS}.{layer}", f"cross_attention.{layer}", "float32", weight_axes)
        for layer in range(config.decoder_layers)
    ]
    parts = DecoderParts(
        layers=config.decoder_layers,
        heads=config.decoder_heads,
        head_size=config.decoder_head_size,
        vocab_size=config.target_vocab_size,
        batch=batch,
        tokens=tokens,
        usual_tokens=OPT_TOKENS,
        modules=MODULES if config.target_positions else MODULES | WITHOUT_POSITIONS,
        example=EXAMPLE,
        choices=(gives_weights,),
        inputs=(source_mask, *make_cross_specs(config, sources, source_tokens)),
        outputs=tuple(weights) if gives_weights else (),
        constraints=("batch % sources == 0",),
        has_positions=config.target_positions,
    )
    return make_decoder_recipe(parts, dialect)


def make_cross_specs(config: TransformerConfig, batch: Axis, tokens: Axis) -> tuple[TensorSpec, ...]:
    axes = (batch, config.decoder_heads, tokens, config.decoder_head_size)
    return make_cache_specs("cross", "cross", config.cross_layers, axes)
