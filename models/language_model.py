"""The interface of decoders without an encoder: a step over new tokens, on top of a cache.

B batch, T new tokens, P cached tokens, K heads of keys and values, D head size, E hidden size, V vocabulary
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from .attention import AttentionCache, DynamicCache, KeyValue, empty_past


class CacheSizes(Protocol):
    """The settings of a decoder that determine its cache."""

    @property
    def cache_sizes(self) -> tuple[int, int, int]:
        """Return the layers, heads and head size of the keys and values that are cached."""
        ...

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return how many tokens each layer sees, the token itself included; None means all."""
        ...


class LanguageModel(nn.Module, ABC):
    """A decoder and its steps; a model adds `hidden_states` and `logits`."""

    config: CacheSizes
    lm_head: nn.Linear  # its results are the logits, by token

    def forward(
        self,
        input_ids: Tensor,
        past: Sequence[KeyValue] | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, list[KeyValue]]:
        """Run one step over new tokens, on top of a cache.

        Args:
            input_ids: (B, T) int64; rows of unequal length are padded on the left.
            past: keys and values (B, K, P, D) of each layer, as the last step returned them.
            attention_mask: (B, P + T), 0 at padding; None when there is none.

        Returns:
            Logits (B, T, V), and the cache grown to (B, K, P + T, D).
        """
        B, T = input_ids.shape
        if past is None:
            past = self.empty_past(B)
        if attention_mask is None:
            attention_mask = input_ids.new_ones(B, past[0][0].shape[2] + T)
        cache = DynamicCache(past, attention_mask)
        return self.logits(self.hidden_states(input_ids, cache)), cache.present

    def empty_past(self, batch: int) -> list[KeyValue]:
        """Return a past of no tokens, for `batch` rows."""
        return empty_past(self.config.cache_sizes, batch, next(self.parameters()))

    @abstractmethod
    def tie_weights(self) -> None:
        """Tie the head's weight to the embedding, where the config says so."""

    @abstractmethod
    def hidden_states(self, input_ids: Tensor, cache: AttentionCache) -> Tensor:
        """Return the last hidden states (B, T, E), which the head reads, of input_ids (B, T)."""

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., E)."""
