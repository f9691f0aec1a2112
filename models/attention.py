"""The seam between a model and its cache.

B batch, T new tokens, P cached tokens, S = P + T, H heads, D head size.

A model computes q, k and v; an `AttentionCache` owns everything around them: positions, mask and
cached keys and values. `GrowingCache` is the plain PyTorch form for decoders, `PaddedAttention` the one
for encoders, which cache nothing. The exporter swaps in others to write the same model in other ONNX
dialects, so no model is written twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

KeyValue: TypeAlias = tuple[Tensor, Tensor]  # each (B, H, P, D)

# Added to the scores that must not count. exp(-30000) is 0 in fp32 and fp16 alike, and unlike -65504
# it stays finite in fp16 when a score is added to it; a row with nothing to see becomes uniform, not NaN.
MASKED = -30000.0


class AttentionCache(Protocol):
    """Positions, mask and cached keys and values of one forward pass."""

    def positions(self, input_ids: Tensor) -> Tensor:
        """Position ids (B, T), or (1, T) where all rows share them, of `input_ids` (B, T)."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Caches k and v of `layer`, returns the attention output; all (B, H, T, D)."""
        ...


class GrowingCache:
    """Keys and values that grow by concatenation; rows may be padded on the left.

    Args:
        past: keys and values (B, H, P, D) of each layer; P may be 0.
        attention_mask: (B, P + T), 1 where a token counts and 0 where it is padding.
        position_ids: (B, T); counted from the mask when None.

    After the forward pass `present` holds each layer's (B, H, P + T, D).
    """

    def __init__(
        self, past: Sequence[KeyValue], attention_mask: Tensor, position_ids: Tensor | None = None
    ) -> None:
        self.past = past
        self.attention_mask = attention_mask
        self.position_ids = position_ids
        self.present: list[KeyValue] = []
        self.bias: Tensor | None = None

    def positions(self, input_ids: Tensor) -> Tensor:
        """Position ids (B, T), and the mask of this step."""
        T = input_ids.shape[1]
        P = self.past[0][0].shape[2]
        column = torch.arange(P + T, device=input_ids.device)
        causal = column[None, :] <= column[P:, None]  # (T, S)
        visible = causal & self.attention_mask.bool()[:, None, None, :]  # (B, 1, T, S)
        self.bias = torch.where(visible, 0.0, MASKED)
        if self.position_ids is None:
            counted = self.attention_mask.cumsum(-1) - 1  # padding gets -1, and is never read
            self.position_ids = counted.clamp(min=0)[:, P:]
        return self.position_ids

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends k and v to `layer`'s past; attention of q over both, (B, H, T, D)."""
        past_k, past_v = self.past[layer]
        k = torch.cat([past_k, k], dim=2)  # (B, H, S, D)
        v = torch.cat([past_v, v], dim=2)  # (B, H, S, D)
        self.present.append((k, v))
        return scaled_dot_product_attention(q, k, v, self.bias)


class PaddedAttention:
    """An encoder's attention: every token sees every token that is not padding; nothing is cached.

    Args:
        attention_mask: (B, T), 1 where a token counts and 0 where it is padding, on the right.
    """

    def __init__(self, attention_mask: Tensor) -> None:
        visible = attention_mask.bool()[:, None, None, :]  # (B, 1, 1, T)
        self.bias = torch.where(visible, 0.0, MASKED)

    def positions(self, input_ids: Tensor) -> Tensor:
        """Position ids (1, T), the same in every row."""
        return torch.arange(input_ids.shape[1], device=input_ids.device)[None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of every token over all tokens, (B, H, T, D)."""
        return scaled_dot_product_attention(q, k, v, self.bias)


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D) + bias) v, as in "Attention Is All You Need" (3.2.1).

    Args:
        q: (B, H, T, D)
        k, v: (B, H, S, D)
        bias: broadcastable to (B, H, T, S); 0 keeps, `MASKED` drops.

    Returns:
        (B, H, T, D)
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.mT  # (B, H, T, S)
    if bias is not None:
        scores = scores + bias
    return torch.matmul(scores.softmax(dim=-1), v)


def empty_past(layers: int, batch: int, heads: int, head_size: int) -> list[KeyValue]:
    """A past of no tokens: `layers` pairs of (B, H, 0, D)."""
    return [(torch.zeros(batch, heads, 0, head_size),) * 2 for _ in range(layers)]
