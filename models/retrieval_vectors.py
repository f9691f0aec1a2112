"""What texts become for retrieval beside one dense vector: sparse weights, and a vector for each token.

B batch, T tokens, E hidden size, V vocabulary, F features of a token's vector
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .config_checks import check_whole
from .sentence import SentenceLayer, VectorLayers, measure_layers

SPLADE_POOLINGS = ("max", "sum")


@dataclass(frozen=True)
class SpladeConfig:
    """SPLADE (Formal et al., 2021): a weight for each word of the vocabulary, of the masked-word head.

    Attributes:
        pooling: how the weights of a text's tokens become one: their "max" or "sum".
        logs: how often log(1 + x) is taken of a weight: 1, or 2 as in OpenSearch's models.
    """

    pooling: str = "max"
    logs: int = 1

    def __post_init__(self) -> None:
        if self.pooling not in SPLADE_POOLINGS:
            raise ValueError(f"pooling={self.pooling!r} must be one of {', '.join(SPLADE_POOLINGS)}")
        check_whole(self, "logs")


@dataclass(frozen=True)
class TokenWeightConfig:
    """A weight for each token of a text, of a linear layer and ReLU, as in BGE-M3 (Chen et al., 2024)."""


@dataclass(frozen=True)
class TokenVectorConfig:
    """A vector for each token of a text, for late interaction (ColBERT, Khattab and Zaharia, 2020).

    Attributes:
        layers: what makes them of the last hidden states, in order.
    """

    layers: tuple[SentenceLayer, ...] = ()

    def measure_vector(self, hidden_size: int) -> int:
        """Return how many numbers a vector has; raise a ValueError where two layers do not fit."""
        return measure_layers(self.layers, hidden_size)


class Splade(nn.Module):
    """The pooling of a masked-word head's logits into one sparse vector for a text."""

    def __init__(self, config: SpladeConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, head: nn.Module, x: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the weights (B, V) of texts whose last hidden state is x (B, T, E)."""
        is_read = (attention_mask > 0).to(x.dtype)
        logits = head(x) * is_read[:, :, None]  # (B, T, V): 0 has no weight
        if self.config.pooling == "sum":
            return self.weigh(logits).sum(1)
        return self.weigh(logits.amax(1))  # a weight grows with its logit

    def weigh(self, logits: Tensor) -> Tensor:
        """Return the weights of logits: those below 0 have none."""
        weights = torch.relu(logits)
        for _ in range(self.config.logs):
            weights = torch.log1p(weights)
        return weights


class TokenWeights(nn.Module):
    """A weight of 0 or more for each token."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weights (B, T) of x (B, T, E)."""
        return torch.relu(self.linear(x)).squeeze(-1)


class TokenVectors(VectorLayers):
    """The layers that make vectors of tokens."""

    def __init__(self, config: TokenVectorConfig) -> None:
        super().__init__(config.layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the vectors (B, T, F) of x (B, T, E)."""
        return self.apply_layers(x)
