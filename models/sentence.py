"""Pools token vectors into one vector per text, as sentence-transformers' modules do.

B batch, T tokens, E hidden size, F features
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from .activations import ACTIVATIONS
from .config_checks import check_activation, check_bool, check_whole
from .masked import MASKED


@dataclass(frozen=True)
class DenseConfig:
    """A linear layer after pooling; activation None leaves its result as it is."""

    in_features: int
    out_features: int
    bias: bool = True
    activation: str | None = None
    kind: str = field(default="dense", init=False)

    def __post_init__(self) -> None:
        check_whole(self, "in_features", "out_features")
        check_bool(self, "bias")
        if self.activation is not None:
            check_activation(self, "activation")


@dataclass(frozen=True)
class LayerNormConfig:
    """A layer that normalizes a vector to mean 0 and variance 1, then scales and shifts each number."""

    dimension: int
    kind: str = field(default="layer_norm", init=False)

    def __post_init__(self) -> None:
        check_whole(self, "dimension")


@dataclass(frozen=True)
class NormalizeConfig:
    """A layer that gives a vector the length 1."""

    kind: str = field(default="normalize", init=False)


SentenceLayer: TypeAlias = DenseConfig | LayerNormConfig | NormalizeConfig


@dataclass(frozen=True)
class SentenceConfig:
    """The way a sentence-transformers folder makes a text's vector from the last hidden state.

    Attributes:
        pooling: one or more of `POOLINGS`; several are put side by side.
        layers: what comes after pooling, in order.
        include_prompt: whether a prompt's tokens are pooled too, with the special ones before it.
    """

    pooling: tuple[str, ...] = ("mean",)
    layers: tuple[SentenceLayer, ...] = ()
    include_prompt: bool = True

    def __post_init__(self) -> None:
        if not self.pooling or not set(self.pooling) <= set(POOLINGS):
            raise ValueError(f"pooling={list(self.pooling)} must be one or more of {sorted(POOLINGS)}")

    @property
    def normalize(self) -> bool:
        """Return whether the vector ends with length 1."""
        return bool(self.layers) and isinstance(self.layers[-1], NormalizeConfig)

    def measure_vector(self, hidden_size: int) -> int:
        """Return how many numbers the vector has.

        Raises:
            ValueError: a layer does not take as many features as the layer before it gives.
        """
        return measure_layers(self.layers, hidden_size * len(self.pooling))


def measure_layers(layers: Sequence[SentenceLayer], width: int) -> int:
    """Return how many numbers the vectors have that layers make of those with `width`.

    Raises:
        ValueError: a layer does not take as many features as the layer before it gives.
    """
    dense = 0  # layers so far
    for layer in layers:
        if isinstance(layer, DenseConfig):
            if layer.in_features != width:
                raise ValueError(f"dense layer {dense} has in_features={layer.in_features}, but gets {width}")
            width = layer.out_features
            dense += 1
        elif isinstance(layer, LayerNormConfig) and layer.dimension != width:
            raise ValueError(f"a LayerNorm has dimension={layer.dimension}, but gets {width}")
    return width


def cls_pooling(x: Tensor, mask: Tensor) -> Tensor:
    return x[:, 0]  # (B, E)


def first_pooling(x: Tensor, mask: Tensor) -> Tensor:
    """Return the first token that is not masked: the first one after a prompt."""
    counted = mask.cumsum(1) * mask
    return ((counted == 1).to(x.dtype)[:, None] @ x)[:, 0]  # (B, E)


def mean_pooling(x: Tensor, mask: Tensor) -> Tensor:
    weights = mask.to(x.dtype)
    weights = weights / weights.sum(1, keepdim=True)  # (B, T): divided first, a sum may leave fp16
    return (weights[:, None] @ x)[:, 0]  # (B, E)


def mean_sqrt_len_pooling(x: Tensor, mask: Tensor) -> Tensor:
    return mean_pooling(x, mask) * mask.to(x.dtype).sum(1, keepdim=True).sqrt()


def max_pooling(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool()[:, :, None], x, MASKED).amax(1)  # (B, E)


def last_token_pooling(x: Tensor, mask: Tensor) -> Tensor:
    position = torch.arange(mask.shape[1], device=mask.device)
    is_last = position == mask.sum(1, keepdim=True) - 1  # (B, T)
    return (is_last.to(x.dtype)[:, None] @ x)[:, 0]  # (B, E)


def weighted_mean_pooling(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean weighted by positions: later tokens, which have seen more, count more."""
    position = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return mean_pooling(x, mask * position)


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": cls_pooling,
    "lasttoken": last_token_pooling,
    "max": max_pooling,
    "mean": mean_pooling,
    "mean_sqrt_len_tokens": mean_sqrt_len_pooling,
    "weightedmean": weighted_mean_pooling,
}


class VectorLayers(nn.Module):
    """The layers that follow where vectors are made of hidden states."""

    def __init__(self, layers: Sequence[SentenceLayer]) -> None:
        super().__init__()
        self.configs = tuple(layers)
        denses = [layer for layer in layers if isinstance(layer, DenseConfig)]
        norms = [layer for layer in layers if isinstance(layer, LayerNormConfig)]
        self.dense = nn.ModuleList(nn.Linear(d.in_features, d.out_features, d.bias) for d in denses)
        self.norms = nn.ModuleList(nn.LayerNorm(norm.dimension) for norm in norms)

    def apply_layers(self, vectors: Tensor) -> Tensor:
        """Return what the layers make of vectors (..., E), one after the other."""
        denses = iter(self.dense)
        norms = iter(self.norms)
        for config in self.configs:
            if isinstance(config, NormalizeConfig):
                vectors = nn.functional.normalize(vectors, dim=-1)
                continue
            vectors = next(denses if isinstance(config, DenseConfig) else norms)(vectors)
            if isinstance(config, DenseConfig) and config.activation is not None:
                vectors = ACTIVATIONS[config.activation]()(vectors)
        return vectors


class SentenceEmbedding(VectorLayers):
    """The pooling of a text's vector, and the layers after it."""

    def __init__(self, config: SentenceConfig) -> None:
        super().__init__(config.layers)
        self.config = config

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the vectors (B, F) of texts whose last hidden state is x (B, T, E).

        attention_mask (B, T) is 0 at padding, and where a prompt is not pooled 2 at its tokens.
        """
        return self.apply_layers(torch.cat(self.pool(x, attention_mask), dim=1))  # (B, E per pooling)

    def pool(self, x: Tensor, attention_mask: Tensor) -> list[Tensor]:
        """Return the vectors (B, E) of each pooling."""
        if self.config.include_prompt:
            return [POOLINGS[name](x, attention_mask) for name in self.config.pooling]
        ways = POOLINGS | {"cls": first_pooling}
        ends = {"lasttoken": attention_mask.clamp(max=1)}
        pooled = (attention_mask == 1).to(attention_mask.dtype)
        return [ways[name](x, ends.get(name, pooled)) for name in self.config.pooling]
