"""What to trace: the module, and the meaning of every input, output and axis of its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ....runtime.bundle.manifest import Axis, TensorSpec

if TYPE_CHECKING:
    from torch import nn


HEAD_SIZES = 8  # GroupQueryAttention takes multiples of it


@dataclass(frozen=True)
class Choices:
    """What a user may choose for a graph.

    Attributes:
        max_batch: the largest batch that plans are made for; ONNX graphs carry it as a range.
        max_length: the longest sequence, in tokens.
        outputs: results beside the usual ones, such as "hidden_states".
    """

    max_batch: int
    max_length: int
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """One graph in one dialect.

    Attributes:
        module: wraps the reference model so that its inputs and outputs are the graph's, in order; None for
            an imported graph.
        example: a length for each dynamic axis while tracing; at least 2, and no two alike,
            because torch.export takes 0, 1 and equal lengths for facts.
    """

    graph: str
    dialect: str
    opset: int
    padding_side: str
    module: Callable[[Any], nn.Module] | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    example: Mapping[str, int]
    aliases: Mapping[str, str] = field(default_factory=dict)
    constraints: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.graph}.{self.dialect}"


def wrap_model(name: str, *choices: object) -> Callable[[Any], nn.Module]:
    """Return what wraps a model in a class of `dialects`, imported only then because it loads torch."""

    def wrap(model: Any) -> nn.Module:
        from .. import dialects

        module: nn.Module = getattr(dialects, name)(model, *choices)
        return module

    return wrap


def by_id(*recipes: Recipe) -> dict[str, Recipe]:
    """Return recipes by their graph and dialect, such as "decoder.portable"."""
    return {recipe.id: recipe for recipe in recipes}


def growing_inputs(batch: Axis, tokens: Axis, total: Axis, rows: Axis) -> tuple[TensorSpec, ...]:
    """Return a decoder's inputs beside its cache in the `portable` dialect: optimum's, and logit_rows."""
    return (
        TensorSpec("input_ids", "ids", "int64", (batch, tokens)),
        TensorSpec("attention_mask", "mask", "int64", (batch, total)),
        TensorSpec("position_ids", "positions", "int64", (batch, tokens)),
        TensorSpec("logit_rows", "logit_rows", "int64", (rows,)),
    )


def slot_inputs(batch: Axis, tokens: Axis, rows: Axis) -> tuple[TensorSpec, ...]:
    """Return a decoder's inputs beside its cache in the dialects with slots, `inplace` and `ort`."""
    return (
        TensorSpec("input_ids", "ids", "int64", (batch, tokens)),
        TensorSpec("past_lengths", "past_lengths", "int32", (batch,)),
        TensorSpec("logit_rows", "logit_rows", "int64", (rows,)),
    )


def cache_specs(name: str, role: str, layers: int, axes: tuple[Axis | int, ...]) -> tuple[TensorSpec, ...]:
    """Return key and value of every layer: `name`.0.key, `name`.0.value, `name`.1.key, ..."""
    return tuple(
        TensorSpec(f"{name}.{layer}.{kind}", f"{role}.{layer}.{kind}", "float32", axes)
        for layer in range(layers)
        for kind in ("key", "value")
    )
