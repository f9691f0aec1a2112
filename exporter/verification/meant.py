"""What a model in PyTorch says of epsilons, activations and attention; its graphs have to say the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..tracing.modules import find_layer

if TYPE_CHECKING:
    from torch import nn

OWN_EPSILONS = ("eps", "variance_epsilon", "epsilon")  # what modules call theirs
# What configs call numbers that embeddings, results of layers and logits are multiplied by.
SCALES = (
    "embedding_scale",
    "residual_scale",
    "logits_scale",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
# Kinds of activations by the names of their classes, PyTorch's and transformers'.
KINDS = {
    "BloomGelu": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
    "ReLU": "relu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
}
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class AttentionMeant:
    """How one layer's attention is meant."""

    heads: int
    shared_heads: int  # of keys and values
    scales: tuple[float, ...]  # any of them will do
    window: int | None = None
    softcap: float | None = None
    rotates: bool = False  # whether the node itself turns queries and keys by their positions


@dataclass(frozen=True)
class Meant:
    """What a model says, by the paths of its modules and by the numbers of its layers."""

    epsilons: Mapping[str, float] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=dict)
    layers: tuple[AttentionMeant, ...] = ()
    encoder_layers: tuple[AttentionMeant, ...] = ()  # of an encoder beside the decoder
    has_softcap: bool = False  # some scores or logits go through tanh
    logits_softcap: float | None = None
    numbers: frozenset[float] = frozenset()  # that it multiplies by, caps with and adds under roots
    is_ours: bool = True

    def find_layer(self, module: str) -> AttentionMeant | None:
        """Return what the layer of a module means; without a number all mean the same, or None is known."""
        layers = self.encoder_layers if module.startswith("encoder.") and self.encoder_layers else self.layers
        number = find_layer(module)
        if number is not None:
            return layers[number] if number < len(layers) else None
        return layers[0] if len(set(layers)) == 1 else None

    def find_epsilons(self, module: str) -> set[float]:
        """Return the epsilons that a normalisation of a module may have."""
        if module in self.epsilons:
            return {self.epsilons[module]}
        # Another exporter's graph may hold a part of the model, under the part's own paths.
        ends = {value for path, value in self.epsilons.items() if module and path.endswith(f".{module}")}
        return ends or set(self.epsilons.values())

    def find_activations(self, module: str) -> set[str]:
        """Return the kinds of activations that a node of a module may have; empty where nothing is known.

        A node that adds a bias too belongs to the module of the bias, beside that of the activation.
        """
        for path in (module, module.rpartition(".")[0]):
            inside = {
                kind
                for own, kind in self.activations.items()
                if own == path or (path and own.rpartition(".")[0] == path)
            }
            if inside:
                return inside
        if not self.is_ours and module:  # functions that are no module are called there
            return set()
        return set(self.activations.values()) | ({"tanh"} if self.has_softcap else set())


def read_meant(model: nn.Module, is_ours: bool) -> Meant:
    """Return what a model says, one of ours or of transformers'."""
    config: Any = getattr(model, "config", None)
    layers = tuple(list_our_layers(model, config) if is_ours else list_their_layers(model, config))
    has_encoder = is_ours and hasattr(config, "encoder_heads")
    encoder_layers = tuple(list_our_layers(model, config, "encoder_")) if has_encoder else ()
    names = ("attention_softcap", "logits_softcap", "attn_logit_softcapping", "final_logit_softcapping")
    caps = [value for name in names if isinstance(value := getattr(config, name, None), float | int)]
    epsilons = dict(list_epsilons(model))
    attention = {scale for layer in (*layers, *encoder_layers) for scale in layer.scales}
    return Meant(
        epsilons=epsilons,
        activations=dict(list_activations(model)),
        layers=layers,
        encoder_layers=encoder_layers,
        has_softcap=bool(caps),
        logits_softcap=getattr(config, "logits_softcap", None),
        numbers=frozenset(
            {*epsilons.values(), *attention, *map(math.sqrt, attention), *caps, *list_scales(model, config)}
        ),
        is_ours=is_ours,
    )


def list_scales(model: nn.Module, config: Any) -> Iterator[float]:
    """Yield what a model multiplies embeddings, results of layers and logits by."""
    for owner in (config, *model.modules()):
        for name in (*SCALES, "scale"):
            value = getattr(owner, name, None)
            if isinstance(value, float | int) and value:
                yield from (float(value), 1 / value)


def list_epsilons(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the paths of normalisations, and their epsilons."""
    for path, module in model.named_modules():
        for name in OWN_EPSILONS:
            value = getattr(module, name, None)
            if isinstance(value, float) and "Norm" in type(module).__name__:
                yield path, value
                break


def list_activations(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the paths of activations, and their kinds."""
    for path, module in model.named_modules():
        name = type(module).__name__
        if name == "GELU":
            yield path, "gelu_tanh" if getattr(module, "approximate", "none") == "tanh" else "gelu"
        elif name in KINDS:
            yield path, KINDS[name]


def list_our_layers(model: Any, config: Any, side: str = "decoder_") -> Iterator[AttentionMeant]:
    """Yield what each layer of a model of ours means; of a Transformer those of one side."""
    first = next(n for n in ("n_head", f"{side}heads", "num_attention_heads") if hasattr(config, n))
    count = next(n for n in ("n_layer", f"{side}layers", "num_hidden_layers") if hasattr(config, n))
    width = next(n for n in ("n_embd", "d_model", "hidden_size") if hasattr(config, n))
    heads = int(getattr(config, first))
    size = int(getattr(config, "head_dim", getattr(config, width) // heads))
    for layer in range(getattr(config, count)):
        kind = config.attention_kind(layer) if hasattr(config, "attention_kind") else None
        scale = getattr(kind, "scale", None) or size**-0.5
        tables = model.tables_of(layer) if hasattr(model, "tables_of") else None
        # GroupQueryAttention turns whole heads of a multiple of 16.
        rotates = tables is not None and 2 * tables.cos.shape[1] == size and size % 16 == 0
        yield AttentionMeant(
            heads=heads,
            shared_heads=int(getattr(config, "num_key_value_heads", heads)),
            scales=(scale,),
            window=getattr(kind, "window", None),
            softcap=getattr(kind, "softcap", None),
            rotates=rotates,
        )


def list_their_layers(model: nn.Module, config: Any) -> Iterator[AttentionMeant]:
    """Yield what each layer of a decoder of transformers' means; nothing where its config has other names."""
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(heads, int) or not isinstance(width, int) or not isinstance(count, int):
        return
    size = getattr(config, "head_dim", None) or width // heads
    own = {value for m in model.modules() if isinstance(value := getattr(m, "scaling", None), float)}
    scales = tuple(own | {size**-0.5, 1.0})  # their graphs may scale the queries before
    kinds = getattr(config, "layer_types", None) or [SLIDING] * count
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    for kind in kinds:
        yield AttentionMeant(
            heads=heads,
            shared_heads=getattr(config, "num_key_value_heads", None) or heads,
            scales=scales,
            window=window if kind == SLIDING else None,
            softcap=getattr(config, "attn_logit_softcapping", None),
        )
