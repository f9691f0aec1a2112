"""The recipes of a model that makes pictures: text encoder, UNet, and the autoencoder's two sides."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ....runtime.bundle.manifest import Axis, TensorSpec
from .recipe import Recipe, TraceOptions, index_recipes, wrap_model

if TYPE_CHECKING:
    from ....models.stable_diffusion import StableDiffusionConfig

TASK = "image-generation"
SIDES = ("height", "width")
MAX_BATCH = 8
MAX_SIZE = 128  # of latents: a picture of 1,024
OPSET = 20
PARTS = "picture_parts"  # the module of `tracing` that has them


def read_context(config: StableDiffusionConfig) -> int:
    """Return the most tokens of a prompt."""
    return config.max_position_embeddings


def make_recipes(config: StableDiffusionConfig, choices: TraceOptions) -> dict[str, Recipe]:
    """Return the recipes of the four graphs, in both dialects."""
    batch = Axis("batch", 1, 1, choices.max_batch)
    embedded = config.unet.time_cond_proj_dim  # features of a guidance scale
    # Guidance runs the UNet for a prompt and for what the picture is led away from.
    rows = replace(batch, opt=1 if embedded is not None else min(2, choices.max_batch))
    tokens = Axis("tokens", 1, choices.max_length, choices.max_length)
    usual = config.unet.sample_size
    sides = [Axis(name, 1, usual, max(usual, MAX_SIZE)) for name in SIDES]
    factor = config.vae.shrinks_by
    large = [Axis(f"picture_{axis.name}", factor, axis.opt * factor, axis.max * factor) for axis in sides]
    text = TensorSpec("text", "text", "float32", (rows, tokens, config.text.hidden_size))
    channels = config.vae.latent_channels

    def latents(name: str, count: Axis = batch) -> TensorSpec:
        return TensorSpec(name, name, "float32", (count, channels, *sides))

    pictures = TensorSpec("pictures", "pictures", "float32", (batch, config.vae.in_channels, *large))
    guidance = []
    if embedded is not None:
        guidance.append(TensorSpec("guidance", "guidance", "float32", (rows, embedded)))
    steps = TensorSpec("timestep", "timestep", "float32", (rows,))
    read = [latents("sample", rows), steps, text, *guidance]
    parts = (
        ("text_encoder", "TextPart", [TensorSpec("input_ids", "ids", "int64", (rows, tokens))], [text]),
        ("unet", "DenoisingPart", read, [latents("noise", rows)]),
        ("vae_decoder", "DecodingPart", [latents("latents")], [pictures]),
        ("vae_encoder", "EncodingPart", [pictures], [latents("mean"), latents("deviation")]),
    )
    return index_recipes(
        recipe
        for graph, module, inputs, outputs in parts
        for recipe in make_both_dialects(graph, module, inputs, outputs, factor)
    )


def make_both_dialects(
    graph: str, module: str, inputs: list[TensorSpec], outputs: list[TensorSpec], factor: int
) -> tuple[Recipe, Recipe]:
    """Return the recipes of one part."""
    example = {"batch": 2, "tokens": 7, "height": 12, "width": 20}
    example |= {"picture_height": 12 * factor, "picture_width": 20 * factor}
    names = {name for spec in (*inputs, *outputs) for name in spec.axis_names()}
    constraints = [f"picture_{side} = {factor} * {side}" for side in SIDES if side in names]
    portable = Recipe(
        graph=graph,
        dialect="portable",
        opset=OPSET,
        padding_side="right",
        module=wrap_model(module, home=PARTS),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        example=example,
        constraints=tuple(constraints),
    )
    return portable, replace(portable, dialect="ort")
