"""GPT-2's decoder graph in each dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....runtime.bundle.manifest import Axis, TensorSpec
from ....runtime.errors import InputError
from .recipe import HEAD_SIZES, Choices, Recipe, by_id, cache_specs, growing_inputs, slot_inputs, wrap_model

if TYPE_CHECKING:
    from ....models import GPT2Config

TASK = "text-generation"
MAX_BATCH = 8  # where an export names none
OPT_TOKENS = 128  # the prompt length that a plan is tuned for
EXAMPLE = {"batch": 2, "tokens": 3, "past": 5, "total": 8, "slots": 11, "rows": 4}


def context_of(config: GPT2Config) -> int:
    """Return the most tokens that the model takes."""
    return config.n_positions


def recipes(config: GPT2Config, choices: Choices) -> dict[str, Recipe]:
    if choices.outputs:
        raise InputError(f"outputs {list(choices.outputs)}: GPT-2 has none to choose, only encoders do")
    found = [make_portable_recipe(config, choices), make_inplace_recipe(config, choices)]
    if config.head_size % HEAD_SIZES == 0:
        found.append(make_ort_recipe(config, choices))
    return by_id(*found)


def make_portable_recipe(config: GPT2Config, choices: Choices) -> Recipe:
    length = choices.max_length
    batch, tokens, rows = common_axes(choices)
    past = Axis("past", 0, min(OPT_TOKENS, length - 1), length - 1)
    total = Axis("total", 1, min(2 * OPT_TOKENS, length), length)
    head = (config.n_head, config.head_size)
    return Recipe(
        graph="decoder",
        dialect="portable",
        opset=20,
        padding_side="left",
        module=wrap_model("PortableDecoder"),
        inputs=(
            *growing_inputs(batch, tokens, total, rows),
            *cache_specs("past_key_values", "past", config.n_layer, (batch, head[0], past, head[1])),
        ),
        outputs=(
            TensorSpec("logits", "logits", "float32", (rows, config.vocab_size)),
            *cache_specs("present", "present", config.n_layer, (batch, head[0], total, head[1])),
        ),
        example=EXAMPLE,
        constraints=("total = past + tokens", "logit_rows < batch * tokens"),
    )


def make_inplace_recipe(config: GPT2Config, choices: Choices) -> Recipe:
    return make_slot_recipe(config, choices, "inplace", 24, "InplaceDecoder")


def make_ort_recipe(config: GPT2Config, choices: Choices) -> Recipe:
    return make_slot_recipe(config, choices, "ort", 20, "OrtDecoder")


def make_slot_recipe(config: GPT2Config, choices: Choices, dialect: str, opset: int, module: str) -> Recipe:
    """Make the recipe of a dialect whose cache is fixed slots, written in place."""
    batch, tokens, rows = common_axes(choices)
    slots = Axis("slots", 1, choices.max_length, choices.max_length)
    cache = cache_specs("cache", "past", config.n_layer, (batch, config.n_head, slots, config.head_size))
    present = cache_specs(
        "present", "present", config.n_layer, (batch, config.n_head, slots, config.head_size)
    )
    return Recipe(
        graph="decoder",
        dialect=dialect,
        opset=opset,
        padding_side="right",
        module=wrap_model(module),
        inputs=(*slot_inputs(batch, tokens, rows), *cache),
        outputs=(TensorSpec("logits", "logits", "float32", (rows, config.vocab_size)), *present),
        example=EXAMPLE,
        aliases={out.name: into.name for out, into in zip(present, cache, strict=True)},
        constraints=("past_lengths + tokens <= slots", "logit_rows < batch * tokens"),
    )


def common_axes(choices: Choices) -> tuple[Axis, Axis, Axis]:
    """Return the axes batch, tokens and rows."""
    return (
        Axis("batch", 1, 1, choices.max_batch),
        Axis("tokens", 1, min(OPT_TOKENS, choices.max_length), choices.max_length),
        Axis("rows", 1, 1, choices.max_batch * choices.max_length),
    )
