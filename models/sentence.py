"""Pools token vectors into one vector per text, as sentence-transformers' modules do.

B batch, T tokens, E hidden size, F features
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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

    def __post_init__(self) -> None:
        check_whole(self, "in_features", "out_features")
        check_bool(self, "bias")
        if self.activation is not None:
            check_activation(self, "activation")


@dataclass(frozen=True)
class SentenceConfig:
    """How a sentence-transformers folder makes a text's vector from the last hidden state.

    Attributes:
        pooling: one or more of `POOLINGS`; several are put side by side.
        dense: layers after pooling, in order.
        normalize: whether the vector ends with length 1.
    """

    pooling: tuple[str, ...] = ("mean",)
    dense: tuple[DenseConfig, ...] = ()
    normalize: bool = False

    def __post_init__(self) -> None:
        if not self.pooling or not set(self.pooling) <= set(POOLINGS):
            raise ValueError(f"pooling={list(self.pooling)} must be one or more of {sorted(POOLINGS)}")

    def check_widths(self, hidden_size: int) -> None:
        """Raise a ValueError unless each dense layer takes as many features as the layer before it gives."""
        width = hidden_size * len(self.pooling)
        for index, dense in enumerate(self.dense):
            if dense.in_features != width:
                raise ValueError(f"dense layer {index} has in_features={dense.in_features}, but gets {width}")
            width = dense.out_features


def cls_pooling(x: Tensor, mask: Tensor) -> Tensor:
    return x[:, 0]  # (B, E)


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
    """Count a token as often as its position says: later ones have seen more."""
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


class SentenceEmbedding(nn.Module):
    """Pooling, dense layers and normalization."""

    def __init__(self, config: SentenceConfig) -> None:
        super().__init__()
        self.config = config
        self.dense = nn.ModuleList(nn.Linear(d.in_features, d.out_features, d.bias) for d in config.dense)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the vectors (B, F) of texts whose last hidden state is x (B, T, E)."""
        pooled = [POOLINGS[name](x, attention_mask) for name in self.config.pooling]
        vector = torch.cat(pooled, dim=1)  # (B, E per pooling)
        for linear, config in zip(self.dense, self.config.dense, strict=True):
            vector = linear(vector)
            if config.activation is not None:
                vector = ACTIVATIONS[config.activation]()(vector)
        return nn.functional.normalize(vector) if self.config.normalize else vector
