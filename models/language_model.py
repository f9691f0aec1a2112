"""The interface of decoders without an encoder: a step over new tokens, on top of a cache.

B batch, T new tokens, P cached tokens, K heads of keys and values, D head size, E hidden size, V vocabulary
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from .adapter_tables import AdapterChoice
from .attention import FULL, SLIDING, AttentionCache, DynamicCache, KeyValue, empty_past
from .config_checks import check_whole


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
    """A decoder and its steps; a model adds `layer_states` and `logits`."""

    config: CacheSizes
    lm_head: nn.Linear  # its results are the logits, by token
    adapters: AdapterChoice | None = None  # of a model with adapters beside it

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

    def limit_context(self, length: int) -> None:
        """Compute the values that depend on the longest text, for up to `length` tokens."""

    @abstractmethod
    def tie_weights(self) -> None:
        """Tie the head's weight to the embedding, where the config says so."""

    def hidden_states(self, input_ids: Tensor, cache: AttentionCache) -> Tensor:
        """Return the last hidden states (B, T, E), which the head reads, of input_ids (B, T)."""
        return deque(self.layer_states(input_ids, cache), maxlen=1).pop()

    @abstractmethod
    def layer_states(self, input_ids: Tensor, cache: AttentionCache) -> Iterator[Tensor]:
        """Yield the embeddings and every layer's output, each (B, T, E), the last one normalized."""

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., E)."""


def check_layer_types(config: Any, layers: str) -> None:
    """Raise a ValueError unless `layer_types` is empty or names each layer's kind, with a `window`.

    `layers` is the field with the number of layers.
    """
    kinds = config.layer_types
    if kinds and len(kinds) != getattr(config, layers):
        raise ValueError(f"layer_types has {len(kinds)} layers, {layers} is {getattr(config, layers)}")
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise ValueError(f"layer_types has {sorted(unknown)[0]!r}; {FULL} and {SLIDING} are known")
    if SLIDING in kinds:
        if config.window is None:
            raise ValueError("layer_types has sliding_attention, but sliding_window is not set")
        check_whole(config, "window")
