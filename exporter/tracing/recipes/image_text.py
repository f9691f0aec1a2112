"""The recipes of CLIP: one graph gives the vectors of texts, and one those of pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....runtime.bundle.manifest import Axis, TensorSpec
from .images import OPSET, PARTS
from .recipe import Recipe, TraceOptions, index_recipes, wrap_model

if TYPE_CHECKING:
    from ....models.clip import ClipConfig

TASK = "image-text-encoding"
MAX_BATCH = 32


def read_context(config: ClipConfig) -> int:
    """Return the most tokens of a text."""
    return config.max_position_embeddings


def make_recipes(config: ClipConfig, choices: TraceOptions) -> dict[str, Recipe]:
    """Return the recipes of both graphs, in both dialects."""
    batch = Axis("batch", 1, 1, choices.max_batch)
    tokens = Axis("tokens", 1, choices.max_length, choices.max_length)
    features = config.text.projection_dim
    assert features is not None
    side = config.vision.image_size
    pixels = (batch, config.vision.num_channels, side, side)
    parts = (
        ("text_encoder", "TextVectorPart", TensorSpec("input_ids", "ids", "int64", (batch, tokens)), "text"),
        ("image_encoder", "PictureVectorPart", TensorSpec("pixels", "pixels", "float32", pixels), "image"),
    )
    return index_recipes(
        Recipe(
            graph=graph,
            dialect=dialect,
            opset=OPSET,
            padding_side="right",
            module=wrap_model(module, home=PARTS),
            inputs=(read,),
            outputs=(TensorSpec(role, role, "float32", (batch, features)),),
            example={"batch": 2, "tokens": 7},
        )
        for graph, module, read, role in parts
        for dialect in ("portable", "ort")
    )
