"""The Transformer's two graphs: the encoder, in one dialect, and the decoder's step in each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....runtime.bundle.manifest import Axis, TensorSpec
from ....runtime.errors import InputError
from .recipe import HEAD_SIZES, Choices, Recipe, by_id, cache_specs, growing_inputs, slot_inputs, wrap_model

if TYPE_CHECKING:
    from ....models import TransformerConfig

TASK = "translation"
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
CROSS_ATTENTIONS = "cross_attentions"


def context_of(config: TransformerConfig) -> int:
    """Return the most tokens of a source, and of a target."""
    return config.max_positions


def recipes(config: TransformerConfig, choices: Choices) -> dict[str, Recipe]:
    if unknown := set(choices.outputs) - {CROSS_ATTENTIONS}:
        raise InputError(
            f"output {sorted(unknown)[0]!r} is not {CROSS_ATTENTIONS}, all that a decoder can add"
        )
    encoders = [make_encoder_recipe(config, choices, dialect) for dialect in ("portable", "ort")]
    decoders = [make_portable_recipe(config, choices), make_inplace_recipe(config, choices)]
    if config.decoder_head_size % HEAD_SIZES == 0:
        decoders.append(make_ort_recipe(config, choices))
    return by_id(*encoders, *decoders)


def make_encoder_recipe(config: TransformerConfig, choices: Choices, dialect: str) -> Recipe:
    batch = Axis("batch", 1, 1, choices.max_batch)
    tokens = Axis("tokens", 1, min(OPT_TOKENS, choices.max_length), choices.max_length)
    return Recipe(
        graph="encoder",
        dialect=dialect,
        opset=20,
        padding_side="right",
        module=wrap_model("SourceEncoder"),
        inputs=(
            TensorSpec("input_ids", "ids", "int64", (batch, tokens)),
            TensorSpec("attention_mask", "mask", "int64", (batch, tokens)),
        ),
        outputs=cross_specs(config, batch, tokens),
        example={"batch": 2, "tokens": 5},
    )


def make_portable_recipe(config: TransformerConfig, choices: Choices) -> Recipe:
    length = choices.max_length
    batch, tokens, rows = target_axes(choices)
    past = Axis("past", 0, min(OPT_TOKENS, length - 1), length - 1)
    total = Axis("total", 1, min(2 * OPT_TOKENS, length), length)
    heads = config.decoder_heads
    size = config.decoder_head_size
    return Recipe(
        graph="decoder",
        dialect="portable",
        opset=20,
        padding_side="left",
        module=wrap_model("PortableTargetDecoder", has_weights(choices)),
        inputs=(
            *growing_inputs(batch, tokens, total, rows),
            *source_specs(config, choices),
            *cache_specs("past_key_values", "past", config.decoder_layers, (batch, heads, past, size)),
        ),
        outputs=(
            TensorSpec("logits", "logits", "float32", (rows, config.target_vocab_size)),
            *cache_specs("present", "present", config.decoder_layers, (batch, heads, total, size)),
            *weight_specs(config, choices, batch, tokens),
        ),
        example=EXAMPLE,
        constraints=("total = past + tokens", "logit_rows < batch * tokens", "batch % sources == 0"),
    )


def make_inplace_recipe(config: TransformerConfig, choices: Choices) -> Recipe:
    return make_slot_recipe(config, choices, "inplace", 24, "InplaceTargetDecoder")


def make_ort_recipe(config: TransformerConfig, choices: Choices) -> Recipe:
    return make_slot_recipe(config, choices, "ort", 20, "OrtTargetDecoder")


def make_slot_recipe(
    config: TransformerConfig,
    choices: Choices,
    dialect: str,
    opset: int,
    module: str,
) -> Recipe:
    """Make the recipe of a dialect whose cache is fixed slots, written in place."""
    batch, tokens, rows = target_axes(choices)
    slots = Axis("slots", 1, choices.max_length, choices.max_length)
    axes = (batch, config.decoder_heads, slots, config.decoder_head_size)
    cache = cache_specs("cache", "past", config.decoder_layers, axes)
    present = cache_specs("present", "present", config.decoder_layers, axes)
    return Recipe(
        graph="decoder",
        dialect=dialect,
        opset=opset,
        padding_side="right",
        module=wrap_model(module, has_weights(choices)),
        inputs=(
            *slot_inputs(batch, tokens, rows),
            *source_specs(config, choices),
            *cache,
        ),
        outputs=(
            TensorSpec("logits", "logits", "float32", (rows, config.target_vocab_size)),
            *present,
            *weight_specs(config, choices, batch, tokens),
        ),
        example=EXAMPLE,
        aliases={out.name: into.name for out, into in zip(present, cache, strict=True)},
        constraints=(
            "past_lengths + tokens <= slots",
            "logit_rows < batch * tokens",
            "batch % sources == 0",
        ),
    )


def target_axes(choices: Choices) -> tuple[Axis, Axis, Axis]:
    """Return the axes batch (of all beams), tokens and rows."""
    batch = MAX_BEAMS * choices.max_batch
    return (
        Axis("batch", 1, 1, batch),
        Axis("tokens", 1, 1, choices.max_length),
        Axis("rows", 1, 1, batch * choices.max_length),
    )


def source_specs(config: TransformerConfig, choices: Choices) -> tuple[TensorSpec, ...]:
    """Return the decoder's inputs from the source."""
    sources = Axis("sources", 1, 1, choices.max_batch)
    tokens = source_axis(choices)
    mask = TensorSpec("encoder_attention_mask", "source_mask", "int64", (sources, tokens))
    return (mask, *cross_specs(config, sources, tokens))


def source_axis(choices: Choices) -> Axis:
    return Axis("source_tokens", 1, min(OPT_TOKENS, choices.max_length), choices.max_length)


def cross_specs(config: TransformerConfig, batch: Axis, tokens: Axis) -> tuple[TensorSpec, ...]:
    axes = (batch, config.decoder_heads, tokens, config.decoder_head_size)
    return cache_specs("cross", "cross", config.decoder_layers, axes)


def has_weights(choices: Choices) -> bool:
    return CROSS_ATTENTIONS in choices.outputs


def weight_specs(config: TransformerConfig, choices: Choices, batch: Axis, tokens: Axis) -> list[TensorSpec]:
    """Return each layer's output of attention weights: target tokens to source tokens, by head."""
    axes = (batch, config.decoder_heads, tokens, source_axis(choices))
    return [
        TensorSpec(f"{CROSS_ATTENTIONS}.{layer}", f"cross_attention.{layer}", "float32", axes)
        for layer in range(config.decoder_layers if has_weights(choices) else 0)
    ]
