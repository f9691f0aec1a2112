"""Recipes to trace: the module, and the meaning of every input, output and axis of its graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ....runtime.bundle.artifact import RECENT, TOTAL, WINDOW_TOTAL, has_role
from ....runtime.bundle.manifest import Axis, TensorSpec
from ....runtime.decoding.cache_shapes import count_recent_slots

if TYPE_CHECKING:
    from torch import nn

HEAD_SIZES = 8  # GroupQueryAttention takes multiples of it


@dataclass(frozen=True)
class TraceOptions:
    """The choices of a user for a graph."""

    max_batch: int  # the largest batch that plans are made for; ONNX graphs carry it as a range
    max_length: int  # the longest sequence, in tokens
    outputs: tuple[str, ...] = ()  # results in addition to the usual ones, such as "hidden_states"
    has_adapters: bool = False  # whether each row of a batch chooses one


@dataclass(frozen=True)
class Recipe:
    """A recipe for one graph in one dialect."""

    graph: str  # "encoder" or "decoder"
    dialect: str  # "portable", "inplace" or "ort"
    opset: int  # of ONNX's own operators
    padding_side: str  # of rows that are shorter than others, "left" or "right"
    # wraps the reference model so that its inputs and outputs are the graph's, in order; None for an imported
    # graph
    module: Callable[[Any], nn.Module] | None
    inputs: tuple[TensorSpec, ...]  # in the graph's order
    outputs: tuple[TensorSpec, ...]
    # a length for each dynamic axis while tracing; at least 2, and no two alike, because torch.export takes
    # 0, 1 and equal lengths for facts
    example: Mapping[str, int]
    aliases: Mapping[str, str] = field(default_factory=dict)  # output name -> input at its address
    constraints: tuple[str, ...] = ()  # what axes must fulfil, such as "total = past + tokens"
    window: int | None = None  # see `Artifact`
    computes_sizes: bool = False  # see `Artifact`
    # of a graph that explains: returns what computes the same of a model in PyTorch
    reference: Callable[[Any], Callable[..., Any]] | None = None

    @property
    def id(self) -> str:
        return f"{self.graph}.{self.dialect}"

    @property
    def keeps_cache(self) -> bool:
        """Return whether it runs on top of keys and values of a past, as a decoder does."""
        return has_role(self.inputs, "past.")

    @property
    def keeps_state(self) -> bool:
        """Return whether each of its steps replaces states of fixed size, as a recurrent decoder does."""
        return has_role(self.inputs, "state.")


def wrap_model(name: str, *choices: object, home: str = "dialects") -> Callable[[Any], nn.Module]:
    """Return a function that wraps a model in a class of a module of `tracing`, which loads torch."""

    def wrap(model: Any) -> nn.Module:
        module: nn.Module = getattr(import_module(f"...{home}", __name__), name)(model, *choices)
        return module

    return wrap


def index_recipes(recipes: Iterable[Recipe]) -> dict[str, Recipe]:
    """Return recipes by their graph and dialect, such as "decoder.portable"."""
    return {recipe.id: recipe for recipe in recipes}


def find_alike(recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """Return for each recipe the first one that is equal, but for its dialect."""
    bare = {name: replace(recipe, dialect="") for name, recipe in recipes.items()}
    return {name: next(other for other in bare if bare[other] == recipe) for name, recipe in bare.items()}


@dataclass(frozen=True)
class DecoderParts:
    """The parts that a model's decoder graphs share in every dialect."""

    layers: int
    heads: int
    head_size: int
    vocab_size: int
    batch: Axis
    tokens: Axis
    usual_tokens: int  # the length that a plan is tuned for
    modules: Mapping[str, str]  # the class of `dialects`, by dialect
    example: Mapping[str, int]
    choices: tuple[object, ...] = ()  # of the module's class, behind the model
    inputs: tuple[TensorSpec, ...] = ()  # before the cache
    outputs: tuple[TensorSpec, ...] = ()  # behind the cache
    constraints: tuple[str, ...] = ()
    has_positions: bool = True  # whether tokens' positions are added or turn anything
    windows: tuple[int | None, ...] = ()  # how many tokens each layer sees, if not all of them see all


def list_decoder_dialects(head_size: int) -> list[str]:
    """Return the dialects that a decoder can have, by the size of its heads."""
    return ["portable", "inplace", "ort"] if head_size % HEAD_SIZES == 0 else ["portable", "inplace"]


def make_decoder_recipe(parts: DecoderParts, dialect: str) -> Recipe:
    """Return a decoder's recipe: in `portable` its cache grows, else it has fixed slots, written in place.

    The inputs of `portable` are optimum's, and logit_rows.
    """
    batch = parts.batch
    tokens = parts.tokens
    length = tokens.max
    rows = Axis("rows", 1, 1, batch.max * length)
    grows = dialect == "portable"
    if grows:
        cached = Axis("past", 0, min(parts.usual_tokens, length - 1), length - 1)
        total = Axis("total", 1, min(2 * parts.usual_tokens, length), length)
        placing = [TensorSpec("attention_mask", "mask", "int64", (batch, total))]
        if parts.has_positions:
            placing.append(TensorSpec("position_ids", "positions", "int64", (batch, tokens)))
    else:
        cached = total = Axis("slots", 1, length, length)
        placing = [TensorSpec("past_lengths", "past_lengths", "int32", (batch,))]
    window = find_window(parts, dialect)
    if dialect == "ort" and (window is None or None in parts.windows):  # some layer reads all slots
        placing.append(TensorSpec(TOTAL, TOTAL, "int32", ()))
    old_axes = (batch, parts.heads, cached, parts.head_size)
    new_axes = (batch, parts.heads, total, parts.head_size)
    past = make_cache_specs("past_key_values" if grows else "cache", "past", parts.layers, old_axes)
    present = make_cache_specs("present", "present", parts.layers, new_axes)
    if window is not None:
        placing.append(TensorSpec("window_starts", "window_starts", "int32", (batch,)))
        placing.append(TensorSpec(WINDOW_TOTAL, WINDOW_TOTAL, "int32", ()))
        past = shorten_windows(past, parts.windows, window)
        present = shorten_windows(present, parts.windows, window)
    return Recipe(
        graph="decoder",
        dialect=dialect,
        opset=24 if dialect == "inplace" else 20,
        padding_side="left" if grows else "right",
        module=wrap_model(parts.modules[dialect], *parts.choices),
        inputs=(
            TensorSpec("input_ids", "ids", "int64", (batch, tokens)),
            *placing,
            TensorSpec("logit_rows", "logit_rows", "int64", (rows,)),
            *parts.inputs,
            *past,
        ),
        outputs=(
            TensorSpec("logits", "logits", "float32", (rows, parts.vocab_size)),
            *present,
            *parts.outputs,
        ),
        example=parts.example,
        aliases={} if grows else {out.name: into.name for out, into in zip(present, past, strict=True)},
        constraints=(
            "total = past + tokens" if grows else "past_lengths + tokens <= slots",
            "logit_rows < batch * tokens",
            *parts.constraints,
        ),
        window=window,
    )


def find_window(parts: DecoderParts, dialect: str) -> int | None:
    """Return the window whose layers keep only the newest tokens; None where that would save no slots."""
    window = max((window for window in parts.windows if window is not None), default=None)
    saves = dialect == "ort" and window is not None and count_recent_slots(window) < parts.tokens.max
    return window if saves else None


def shorten_windows(
    specs: Sequence[TensorSpec], windows: Sequence[int | None], window: int
) -> tuple[TensorSpec, ...]:
    """Return a cache's tensors, two of each layer, with fewer slots where the layer sees a window."""
    slots = count_recent_slots(window)
    recent = Axis(RECENT, 1, slots, slots)
    shortened = []
    for number, spec in enumerate(specs):
        batch, heads, _, size = spec.axes
        has_window = windows[number // 2] is not None
        shortened.append(replace(spec, axes=(batch, heads, recent, size)) if has_window else spec)
    return tuple(shortened)


def make_cache_specs(
    name: str, role: str, layers: int, axes: tuple[Axis | int, ...]
) -> tuple[TensorSpec, ...]:
    """Return key and value of every layer: `name`.0.key, `name`.0.value, `name`.1.key, ..."""
    return tuple(
        TensorSpec(f"{name}.{layer}.{kind}", f"{role}.{layer}.{kind}", "float32", axes)
        for layer in range(layers)
        for kind in ("key", "value")
    )
