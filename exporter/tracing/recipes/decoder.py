"""The graph of a decoder, GPT-2 or one of the Llama family, in each dialect."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ....runtime.bundle.artifact import ADAPTERS, RECENT
from ....runtime.bundle.manifest import Axis, TensorSpec
from ....runtime.errors import InputError
from ...task_traits import GENERATION
from .recipe import (
    DecoderParts,
    Recipe,
    TraceOptions,
    index_recipes,
    list_decoder_dialects,
    make_decoder_recipe,
)

if TYPE_CHECKING:
    from ....models import GPT2Config, LlamaConfig

TASK = GENERATION.name
MAX_BATCH = 8  # where an export names none
OPT_TOKENS = 128  # the prompt length that a plan is tuned for
MODULES = {
    "portable": "PortableDecoder",
    "inplace": "InplaceDecoder",
    "ort": "OrtDecoder",
}
EXAMPLE = {"batch": 2, "tokens": 3, "past": 5, "total": 8, "slots": 11, RECENT: 9, "rows": 4}


def read_context(config: GPT2Config | LlamaConfig) -> int:
    """Return the most tokens that the model takes."""
    return config.context


def make_recipes(config: GPT2Config | LlamaConfig, choices: TraceOptions) -> dict[str, Recipe]:
    if choices.outputs:
        raise InputError(f"outputs {list(choices.outputs)}: a decoder supports only 'explain'")
    _, _, head_size = config.cache_sizes
    dialects = list_decoder_dialects(head_size)
    return index_recipes(make_decoder(config, choices, dialect) for dialect in dialects)


def make_decoder(config: GPT2Config | LlamaConfig, choices: TraceOptions, dialect: str) -> Recipe:
    """Make the recipe of the decoder in a dialect."""
    length = choices.max_length
    layers, heads, head_size = config.cache_sizes
    batch = Axis("batch", 1, 1, choices.max_batch)
    chosen = TensorSpec(ADAPTERS, ADAPTERS, "int64", (batch,))
    parts = DecoderParts(
        layers=layers,
        heads=heads,
        head_size=head_size,
        vocab_size=config.vocab_size,
        batch=batch,
        tokens=Axis("tokens", 1, min(OPT_TOKENS, length), length),
        usual_tokens=OPT_TOKENS,
        modules=MODULES,
        example=EXAMPLE,
        windows=config.windows,
        inputs=(chosen,) if choices.has_adapters else (),
    )
    routes = getattr(config, "num_experts", 0) > 0 and dialect == "ort"
    return replace(make_decoder_recipe(parts, dialect), computes_sizes=routes)
