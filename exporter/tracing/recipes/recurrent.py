"""The recurrent encoder-decoder's graphs: the encoder, and the decoder's step, with states of fixed size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....runtime.bundle.manifest import Axis, TensorSpec
from ....runtime.errors import InputError
from .recipe import Recipe, TraceOptions, index_recipes, wrap_model
from .transformer import CROSS_ATTENTIONS, MAX_BEAMS, OPT_TOKENS

if TYPE_CHECKING:
    from ....models.recurrent import RecurrentConfig

OPSET = 20
PARTS = "recurrent"  # the module of `tracing` that has them


def make_recipes(config: RecurrentConfig, choices: TraceOptions) -> dict[str, Recipe]:
    """Return the recipes of both graphs, which are alike for every engine."""
    known = {CROSS_ATTENTIONS} if config.has_attention else set()
    if unknown := sorted(set(choices.outputs) - known):
        can = f"only {CROSS_ATTENTIONS} can be added" if known else "without attention there is none to add"
        raise InputError(f"output {unknown[0]!r} is not known: {can}")
    return index_recipes((make_encoder(config, choices), make_decoder(config, choices)))


def make_encoder(config: RecurrentConfig, choices: TraceOptions) -> Recipe:
    batch = Axis("batch", 1, 1, choices.max_batch)
    tokens = Axis("tokens", 1, min(OPT_TOKENS, choices.max_length), choices.max_length)
    states = list_states(config, "state", batch)
    return Recipe(
        graph="encoder",
        dialect="portable",
        opset=OPSET,
        padding_side="right",
        module=wrap_model("RecurrentEncoder", home=PARTS),
        inputs=(
            TensorSpec("input_ids", "ids", "int64", (batch, tokens)),
            TensorSpec("lengths", "lengths", "int32", (batch,)),
        ),
        # The vector that is fed begins with zeros, which no graph needs to compute.
        outputs=(*list_source(config, batch, tokens), *states[: len(states) - config.input_feeding]),
        example={"batch": 2, "tokens": 5},
    )


def make_decoder(config: RecurrentConfig, choices: TraceOptions) -> Recipe:
    """Make the recipe of the decoder's step over one token of each row; its batch is of all beams."""
    rows = Axis("batch", 1, 1, MAX_BEAMS * choices.max_batch)
    logit_rows = Axis("rows", 1, 1, rows.max)
    sources = Axis("sources", 1, 1, choices.max_batch)
    source_tokens = Axis("source_tokens", 1, min(OPT_TOKENS, choices.max_length), choices.max_length)
    source = list_source(config, sources, source_tokens)
    if config.has_attention:
        mask = TensorSpec("encoder_attention_mask", "source_mask", "int64", (sources, source_tokens))
        source = (mask, *source)
    added = []
    if choices.outputs:
        weights = (rows, 1, 1, source_tokens)
        added.append(TensorSpec(f"{CROSS_ATTENTIONS}.0", "cross_attention.0", "float32", weights))
    return Recipe(
        graph="decoder",
        dialect="portable",
        opset=OPSET,
        padding_side="right",
        module=wrap_model("RecurrentDecoder", bool(added), home=PARTS),
        inputs=(
            TensorSpec("input_ids", "ids", "int64", (rows, 1)),
            TensorSpec("attention_mask", "mask", "int64", (rows, 1)),
            TensorSpec("logit_rows", "logit_rows", "int64", (logit_rows,)),
            *source,
            *list_states(config, "state", rows),
        ),
        outputs=(
            TensorSpec("logits", "logits", "float32", (logit_rows, config.target_vocab_size)),
            *list_states(config, "next_state", rows),
            *added,
        ),
        example={"batch": 6, "rows": 4, "sources": 3, "source_tokens": 8},
        constraints=("logit_rows < batch", *(["batch % sources == 0"] if source else [])),
    )


def list_source(config: RecurrentConfig, batch: Axis, tokens: Axis) -> tuple[TensorSpec, ...]:
    """Return what each step reads of a source, in the order of `SourceMemory.list_tensors`."""

    def make(name: str, *axes: Axis | int) -> TensorSpec:
        return TensorSpec(name, f"cross.{name}", "float32", axes)

    if not config.has_attention:
        return (make("context", batch, 1, config.memory_size),) if config.feed_context else ()
    memory = make("memory", batch, tokens, config.memory_size)
    return (memory,) if config.key_size is None else (memory, make("keys", batch, tokens, config.key_size))


def list_states(config: RecurrentConfig, role: str, batch: Axis) -> tuple[TensorSpec, ...]:
    """Return the decoder's states."""
    return tuple(
        TensorSpec(f"{role}.{name}", f"{role}.{name}", "float32", (batch, 1, config.decoder_size))
        for name in config.state_names
    )
