"""The encoder graph of BERT and DistilBERT. It caches nothing, so its dialects differ by operators alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ....runtime.bundle.manifest import Axis, TensorSpec
from ....runtime.errors import InputError
from .recipe import Choices, Recipe, index_recipes, wrap_model

if TYPE_CHECKING:
    from ....models import BertConfig

TASK = "text-encoding"
MAX_BATCH = 32  # where an export names none
ROWS = 16  # masked words of a text, at most: a row of logits is as wide as the vocabulary
EXAMPLE = {"batch": 2, "tokens": 5, "rows": 3}


def read_context(config: BertConfig) -> int:
    """Return the most tokens that the model takes."""
    return config.max_position_embeddings


def make_recipes(config: BertConfig, choices: Choices) -> dict[str, Recipe]:
    layers, pooler_output = resolve_extra_outputs(config, choices.outputs)
    batch = Axis("batch", 1, min(8, choices.max_batch), choices.max_batch)
    tokens = Axis("tokens", 1, min(128, choices.max_length), choices.max_length)
    rows = Axis("rows", 1, 1, choices.max_batch * min(ROWS, choices.max_length))
    inputs = [
        TensorSpec("input_ids", "ids", "int64", (batch, tokens)),
        TensorSpec("attention_mask", "mask", "int64", (batch, tokens)),
    ]
    if config.type_vocab_size:
        inputs.append(TensorSpec("token_type_ids", "segments", "int64", (batch, tokens)))
    has_rows = "masked_lm" in config.heads
    if has_rows:
        inputs.append(TensorSpec("logit_rows", "logit_rows", "int64", (rows,)))

    def hidden(name: str, layer: int) -> TensorSpec:
        return TensorSpec(name, f"hidden.{layer}", "float32", (batch, tokens, config.hidden_size))

    outputs = [
        hidden("last_hidden_state", config.num_hidden_layers),
        *make_head_specs(config, batch, tokens, rows),
        *(hidden(f"hidden_states.{layer}", layer) for layer in layers),
    ]
    if pooler_output:
        outputs.append(TensorSpec("pooler_output", "pooler_output", "float32", (batch, config.hidden_size)))
    portable = Recipe(
        graph="encoder",
        dialect="portable",
        opset=20,
        padding_side="right",
        module=wrap_model("PortableEncoder", layers, pooler_output),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        example=EXAMPLE,
        constraints=("logit_rows < batch * tokens",) if has_rows else (),
    )
    return index_recipes((portable, replace(portable, dialect="ort")))


def make_head_specs(config: BertConfig, batch: Axis, tokens: Axis, rows: Axis) -> list[TensorSpec]:
    """Return an output per head, with transformers' names."""
    axes: dict[str, tuple[Axis | int, ...]] = {
        "masked_lm": (rows, config.vocab_size),
        "next_sentence": (batch, 2),
        "sequence_classification": (batch, config.num_labels),
        "token_classification": (batch, tokens, config.num_labels),
    }
    names = {"masked_lm": "prediction_logits", "next_sentence": "seq_relationship_logits"}
    specs = []
    for head in config.heads:
        if head == "question_answering":
            for end in ("start", "end"):
                specs.append(TensorSpec(f"{end}_logits", f"{head}.{end}", "float32", (batch, tokens)))
        else:
            name = names.get(head, "logits") if len(config.heads) > 1 else "logits"
            specs.append(TensorSpec(name, head, "float32", axes[head]))
    if config.sentence is not None:
        dense = config.sentence.dense
        width = dense[-1].out_features if dense else config.hidden_size * len(config.sentence.pooling)
        specs.append(TensorSpec("sentence_embedding", "sentence_embedding", "float32", (batch, width)))
    return specs


def resolve_extra_outputs(config: BertConfig, outputs: tuple[str, ...]) -> tuple[tuple[int, ...], bool]:
    """Return the layers whose hidden states are outputs (0: the embeddings), and whether the pooler's is."""
    layers = config.num_hidden_layers
    known = {f"hidden_states.{layer}": layer for layer in range(layers)}
    wanted: set[int] = set()
    for name in outputs:
        if name == "hidden_states":
            wanted |= set(known.values())
        elif name in known:
            wanted.add(known[name])
        elif name != "pooler_output" or config.pooler is None:
            pooler = ", pooler_output" if config.pooler is not None else ""
            raise InputError(
                f"output {name!r} is not one of hidden_states (all layers), hidden_states.0 (the embeddings)"
                f" to hidden_states.{layers - 1}{pooler}; last_hidden_state is always there"
            )
    return tuple(sorted(wanted)), "pooler_output" in outputs
