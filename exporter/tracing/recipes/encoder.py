"""The graph of an encoder, whose dialects differ by operators alone, as it has no cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ....runtime.bundle.manifest import Axis, TensorSpec
from ....runtime.errors import InputError
from ...task_traits import ENCODING
from .recipe import Recipe, TraceOptions, index_recipes, wrap_model

if TYPE_CHECKING:
    from torch import nn

    from ....models.encoder import EncoderConfig

Axes: TypeAlias = Mapping[str, tuple[Axis | int, ...]]

TASK = ENCODING.name
QUERIES = "query_encoder"  # the graph of an encoder that reads queries, where there is another for documents
MAX_BATCH = 32  # where an export names none
ROWS = 16  # masked words of a text, at most: a row of logits is as wide as the vocabulary
EXAMPLE = {"batch": 2, "tokens": 5, "rows": 3}
# The inputs, with transformers' names, and their roles.
ROLES = {"input_ids": "ids", "attention_mask": "mask", "token_type_ids": "segments"}


def read_context(config: EncoderConfig) -> int:
    """Return the most tokens that the model takes."""
    return config.max_position_embeddings


def make_recipes(config: EncoderConfig, choices: TraceOptions) -> dict[str, Recipe]:
    recipes = make_encoder_recipes(config, choices, "encoder", "PortableEncoder")
    if config.query is None:
        return recipes
    return recipes | make_encoder_recipes(config.query, replace(choices, outputs=()), QUERIES, "QueryEncoder")


def make_encoder_recipes(
    config: EncoderConfig, choices: TraceOptions, graph: str, module: str
) -> dict[str, Recipe]:
    """Return the recipes of one encoder's graph, which `module` makes."""
    layers, pooler_output = resolve_extra_outputs(config, choices.outputs)
    axes = list_axes(config, choices)

    def hidden(name: str, layer: int) -> TensorSpec:
        return TensorSpec(name, f"hidden.{layer}", "float32", axes["hidden"])

    outputs = [
        hidden("last_hidden_state", config.num_hidden_layers),
        *make_head_specs(config, axes),
        *(hidden(f"hidden_states.{layer}", layer) for layer in layers),
    ]
    if pooler_output:
        outputs.append(TensorSpec("pooler_output", "pooler_output", "float32", axes["pooler_output"]))
    inputs = [name for name in ROLES if name != "token_type_ids" or config.type_vocab_size]
    if graph == QUERIES:
        outputs = [replace(spec, name=f"query_{spec.name}") for spec in outputs]
    both = make_both_dialects(inputs, outputs, axes, 20, wrap_model(module, layers, pooler_output), graph)
    if config.num_experts == 0:
        return both
    of_chosen = wrap_model(module, layers, pooler_output, False)  # on a CPU the chosen experts alone
    ort = replace(both[f"{graph}.ort"], module=of_chosen, computes_sizes=True)
    return both | index_recipes([ort])


def list_axes(config: EncoderConfig, choices: TraceOptions) -> Axes:
    """Return the axes of inputs and outputs by their roles; all layers' hidden states share "hidden"."""
    batch = Axis("batch", 1, min(8, choices.max_batch), choices.max_batch)
    tokens = Axis("tokens", 1, min(128, choices.max_length), choices.max_length)
    rows = Axis("rows", 1, 1, choices.max_batch * min(ROWS, choices.max_length))
    return {
        **dict.fromkeys(ROLES.values(), (batch, tokens)),
        "logit_rows": (rows,),
        "hidden": (batch, tokens, config.hidden_size),
        "pooler_output": (batch, config.hidden_size),
        "masked_lm": (rows, config.vocab_size),
        "next_sentence": (batch, 2),
        "sequence_classification": (batch, config.num_labels),
        "token_classification": (batch, tokens, config.num_labels),
        "question_answering.start": (batch, tokens),
        "question_answering.end": (batch, tokens),
    }


def make_both_dialects(
    names: Collection[str],
    outputs: Sequence[TensorSpec],
    axes: Axes,
    opset: int,
    module: Callable[[Any], nn.Module] | None = None,
    graph: str = "encoder",
) -> dict[str, Recipe]:
    """Return an encoder's recipes, given the names of its inputs; a masked_lm also gets logit_rows."""
    inputs = [TensorSpec(name, role, "int64", axes[role]) for name, role in ROLES.items() if name in names]
    has_rows = any(spec.role == "masked_lm" for spec in outputs)
    if has_rows:
        inputs.append(TensorSpec("logit_rows", "logit_rows", "int64", axes["logit_rows"]))
    portable = Recipe(
        graph=graph,
        dialect="portable",
        opset=opset,
        padding_side="right",
        module=module,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        example=EXAMPLE,
        constraints=("logit_rows < batch * tokens",) if has_rows else (),
    )
    return index_recipes((portable, replace(portable, dialect="ort")))


def make_head_specs(config: EncoderConfig, axes: Axes) -> list[TensorSpec]:
    """Return an output per head, with transformers' names, and one for each vector of a text."""
    names = {"masked_lm": "prediction_logits", "next_sentence": "seq_relationship_logits"}
    specs = []
    for head in config.output_heads:
        if head == "question_answering":
            for end in ("start", "end"):
                specs.append(TensorSpec(f"{end}_logits", f"{head}.{end}", "float32", axes[f"{head}.{end}"]))
        else:
            name = names.get(head, "logits") if len(config.output_heads) > 1 else "logits"
            specs.append(TensorSpec(name, head, "float32", axes[head]))
    named = dict(zip(("batch", "tokens"), axes["hidden"], strict=False))
    for name, vector in config.list_vectors().items():
        own = tuple(named[axis] if isinstance(axis, str) else axis for axis in vector)
        specs.append(TensorSpec(name, name, "float32", own))
    return specs


def resolve_extra_outputs(config: EncoderConfig, outputs: tuple[str, ...]) -> tuple[tuple[int, ...], bool]:
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
