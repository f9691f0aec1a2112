"""The input and output names of optimum's graphs, and their renaming to a recipe's names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common

from ...runtime.bundle.manifest import TensorSpec
from ..errors import ExportError
from .branches import SWITCH

STATE_NAMES = ("last_hidden_state", "token_embeddings")  # the latter for a sentence-transformers checkpoint
POOLED = ("sentence_embedding", "pooler_output")
ENDS = ("start_logits", "end_logits")
LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Signature:
    """The names of one kind of graph, in which N stands for a layer."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    optional: tuple[str, ...] = ()  # inputs and outputs that the graph need not have

    def check(self, model: ir.Model, path: Path) -> None:
        """Refuse a graph with unknown inputs or outputs, or without the needed ones."""
        names = [str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)]
        needed = (*self.inputs, *self.outputs)
        unknown = [name for name in names if replace_layer(name) not in (*needed, *self.optional)]
        missing = [name for name in needed if name not in map(replace_layer, names)]
        if not unknown and not missing:
            missing = find_missing_in_layers(names)
        reasons = [f"{', '.join(unknown)} is not a known input or output"] if unknown else []
        reasons += [f"{', '.join(missing)} is missing"] if missing else []
        if reasons:
            perhaps = f" (optionally {', '.join(self.optional)})" if self.optional else ""
            raise ExportError(
                f"{path}: {', and '.join(reasons)}; the graph has {', '.join(names)}. Expected are"
                f" {', '.join(needed)}{perhaps}, as optimum writes them"
            )


def name_caches(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{kind}" for name in names for kind in ("key", "value"))


DECODER = Signature(
    inputs=("input_ids", *name_caches("past_key_values.N")),
    outputs=("logits", *name_caches("present.N")),
    optional=("attention_mask", "position_ids", SWITCH),
)
ENCODER = Signature(  # a graph has some of the outputs
    inputs=("input_ids",),
    outputs=(),
    optional=("attention_mask", "token_type_ids", *STATE_NAMES, *POOLED, "logits", *ENDS),
)
# The graphs of an encoder-decoder.
SOURCE_ENCODER = Signature(inputs=("input_ids", "attention_mask"), outputs=("last_hidden_state",))
WHOLE_ENCODER = Signature(inputs=SOURCE_ENCODER.inputs, outputs=name_caches("present.N.encoder"))
FIRST_STEP = Signature(
    inputs=("input_ids", "encoder_attention_mask", "encoder_hidden_states"),
    outputs=("logits", *name_caches("present.N.decoder", "present.N.encoder")),
    optional=("attention_mask", "position_ids"),
)
LATER_STEP = Signature(
    inputs=(
        "input_ids",
        "encoder_attention_mask",
        *name_caches("past_key_values.N.decoder", "past_key_values.N.encoder"),
    ),
    outputs=("logits", *name_caches("present.N.decoder")),
    optional=(*FIRST_STEP.optional, "encoder_hidden_states", *name_caches("present.N.encoder"), SWITCH),
)


def replace_layer(name: str) -> str:
    return LAYER.sub(".N.", name)


def find_missing_in_layers(names: Iterable[str]) -> list[str]:
    """Return the names that some layers have and others lack."""
    layers: dict[str, set[str]] = {}
    for name in names:
        if match := LAYER.search(name):
            layers.setdefault(replace_layer(name), set()).add(match[1])
    count = max(map(len, layers.values()), default=0)
    wanted = {str(layer) for layer in range(count)}
    return sorted(name.replace(".N.", f".{i}.") for name, found in layers.items() for i in wanted - found)


def set_signature(model: ir.Model, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Give a graph the names, order and axes of a recipe; a cache of slots is called cache.0.key."""
    for values, specs in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        by_name = {str(v.name): v for v in values}
        values.clear()
        for spec in specs:
            value = by_name[re.sub(r"^cache\.", "past_key_values.", spec.name)]
            value.name = spec.name
            value.shape = ir.Shape(spec.axis_names())
            values.append(value)
    common.RemoveUnusedNodesPass()(model)
