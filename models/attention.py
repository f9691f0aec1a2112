"""The interface between a model and its key/value cache.

B batch, T new tokens, P cached tokens, S = P + T, H heads of queries, K heads of keys and values, D head
size. K is H, or divides it: a group of H / K queries shares one head of keys and values.

A model computes q, k and v; an `AttentionCache` owns everything around them: positions, mask and
cached keys and values. `DynamicCache` is the plain PyTorch form for decoders, `PaddedAttention` the one
for encoders, which cache nothing, `CausalAttention` that of decoders that read whole texts. A decoder
with an encoder looks at the source through `SourceAttention`. The exporter swaps in others to write the same
model in other ONNX dialects, so no model is written twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from .masked import MASKED
from .rotary import RotaryTables

# What a layer sees: all tokens, or those of a window.
FULL = "full_attention"
SLIDING = "sliding_attention"
KeyValue: TypeAlias = tuple[Tensor, Tensor]  # each (B, K, P, D)


@dataclass(frozen=True)
class AttentionKind:
    """The scale, cap and mask of one layer's scores.

    Attributes:
        scale: multiplies q k^T; None means D ** -0.5.
        window: how many tokens are seen, the token itself included; an encoder's tokens see as many
            behind them as before. None means all.
        softcap: c in c * tanh(scores / c); None means no cap.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None


PLAIN = AttentionKind()
Windows: TypeAlias = Sequence[int | None]


class AttentionCache(Protocol):
    """Positions, mask and cached keys and values of one forward pass."""

    def positions(self, input_ids: Tensor, windows: Windows = (None,)) -> Tensor:
        """Return position ids (B, T), or (1, T) where all rows share them, of `input_ids` (B, T).

        `windows` are those that the layers' kinds of attention have.
        """
        ...

    def rotate(self, x: Tensor, tables: RotaryTables) -> Tensor:
        """Return queries or keys (B, h, T, D) turned by their positions."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = PLAIN) -> Tensor:
        """Cache k and v (B, K, T, D) of `layer`; return the attention of q, both (B, H, T, D)."""
        ...


class DynamicCache:
    """Keys and values that grow by concatenation; rows may be padded on the left.

    Args:
        past: keys and values (B, K, P, D) of each layer; P may be 0.
        attention_mask: (B, P + T), 1 where a token counts and 0 where it is padding.
        position_ids: (B, T); counted from the mask when None.
        bias: a mask of the caller's own, added to the scores (B, H, T, S) or broadcast to them.

    After the forward pass `present` holds each layer's (B, K, P + T, D).
    """

    dropout: float = 0.0  # the share of attention's weights that are dropped in training, see dropout.py

    def __init__(
        self,
        past: Sequence[KeyValue],
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        self.past = past
        self.attention_mask = attention_mask
        self.position_ids = position_ids
        self.present: list[KeyValue] = []
        self.own_bias = bias
        self.biases: dict[int | None, Tensor] = {}  # by window

    def positions(self, input_ids: Tensor, windows: Windows = (None,)) -> Tensor:
        """Return position ids (B, T), and make this step's masks."""
        P = self.past[0][0].shape[2]
        self.biases = {window: self.step_bias(input_ids.shape[1], window) for window in windows}
        if self.position_ids is None:
            counted = self.attention_mask.bool().cumsum(-1) - 1  # padding gets -1, and is never read
            self.position_ids = counted.clamp(min=0)[:, P:]
        return self.position_ids

    def rotate(self, x: Tensor, tables: RotaryTables) -> Tensor:
        """Return queries or keys (B, h, T, D) turned by their positions."""
        assert self.position_ids is not None, "positions() comes first"
        return tables.rotate(x, self.position_ids)

    def step_bias(self, T: int, window: int | None) -> Tensor:
        """Return the mask (B, 1, T, S) of padding, later tokens, those before the window and the caller's."""
        P = self.past[0][0].shape[2]
        column = torch.arange(P + T, device=self.attention_mask.device)
        causal = column[None, :] <= column[P:, None]  # (T, S)
        if window is not None:
            # Tokens are counted, not columns: between two tokens may be some that are masked.
            counted = self.attention_mask.cumsum(-1)  # (B, S)
            behind = counted[:, P:, None] - counted[:, None, :]  # (B, T, S)
            causal = (causal & (behind < window))[:, None]  # (B, 1, T, S)
        visible = causal & self.attention_mask.bool()[:, None, None, :]  # (B, 1, T, S)
        return with_own(torch.where(visible, 0.0, MASKED), self.own_bias)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = PLAIN) -> Tensor:
        """Append k and v to `layer`'s past; return the attention of q over both, (B, H, T, D).

        Raises:
            ValueError: the layer attended before: in a second pass `past` would lack what the first wrote.
        """
        if layer < len(self.present):
            raise ValueError(
                f"layer {layer} has attended already, and a DynamicCache serves one forward pass; make"
                " another, whose past is this one's `present`"
            )
        if kind.window not in self.biases:  # a model without positions has not called `positions`
            self.biases[kind.window] = self.step_bias(q.shape[2], kind.window)
        past_k, past_v = self.past[layer]
        k = torch.cat([past_k, k], dim=2)  # (B, K, S, D)
        v = torch.cat([past_v, v], dim=2)  # (B, K, S, D)
        self.present.append((k, v))
        return self.weigh(q, k, v, kind)

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind) -> Tensor:
        """Return the attention of q (B, H, T, D) over old and new k and v (B, K, S, D)."""
        return scaled_dot_product_attention(q, k, v, self.biases[kind.window], kind, self.dropout)


class PaddedAttention:
    """An encoder's attention: every token sees all tokens near it that are not padding; nothing is cached.

    Args:
        attention_mask: (B, T), 1 where a token counts and 0 where it is padding, on the right.
        bias: a mask of the caller's own, added to the scores (B, H, T, T) or broadcast to them.
    """

    dropout: float = 0.0  # as `DynamicCache.dropout`

    def __init__(self, attention_mask: Tensor, bias: Tensor | None = None) -> None:
        self.attention_mask = attention_mask
        self.own_bias = bias
        self.biases: dict[int | None, Tensor] = {}  # by window

    def positions(self, input_ids: Tensor, windows: Windows = (None,)) -> Tensor:
        """Return position ids (1, T), the same in every row, and make the masks."""
        self.biases = {window: self.make_bias(window) for window in windows}
        return self.count_positions()

    def count_positions(self) -> Tensor:
        """Return position ids (1, T)."""
        mask = self.attention_mask
        return torch.arange(mask.shape[1], device=mask.device)[None]

    def make_bias(self, window: int | None) -> Tensor:
        """Return the mask of padding (B, 1, 1, T), or of it and what a window hides (B, 1, T, T)."""
        bias = padding_bias(self.attention_mask)
        if window is not None:
            position = self.count_positions()
            distance = (position.mT - position).abs()  # (T, T)
            bias = torch.where(distance < window, bias, MASKED)
        return with_own(bias, self.own_bias)

    def rotate(self, x: Tensor, tables: RotaryTables) -> Tensor:
        """Return queries or keys (B, h, T, D) turned by their positions."""
        return tables.rotate(x, self.count_positions())

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = PLAIN) -> Tensor:
        """Return the attention of every token over all tokens in its window, (B, H, T, D)."""
        if kind.window not in self.biases:  # a model without positions has not called `positions`
            self.biases[kind.window] = self.make_bias(kind.window)
        return scaled_dot_product_attention(q, k, v, self.biases[kind.window], kind, self.dropout)


class CausalAttention(PaddedAttention):
    """A decoder's attention over whole texts padded on the right: a token sees itself and those before it."""

    def make_bias(self, window: int | None) -> Tensor:
        """Return the mask (B, 1, T, T) of padding, later tokens and those before the window."""
        position = self.count_positions()
        behind = position.mT - position  # (T, T)
        visible = behind >= 0
        if window is not None:
            visible = visible & (behind < window)
        return with_own(torch.where(visible, padding_bias(self.attention_mask), MASKED), self.own_bias)


class SourceAttention:
    """A decoder's attention over the source: keys and values are computed once, and padding is masked.

    K rows of the decoder (beams) that belong to one source look at it as one row of K * T queries.

    Args:
        keys_values: keys and values (B, H, S, D) of each layer, or one pair for all.
        attention_mask: (B, S), 1 where a source token counts and 0 where it is padding.
        bias: a mask of the caller's own, added to the scores (B, H, K * T, S) or broadcast to them.

    After a forward pass `weights` holds each layer's (B, H, K * T, S).
    """

    dropout: float = 0.0  # as `DynamicCache.dropout`

    def __init__(
        self, keys_values: Sequence[KeyValue], attention_mask: Tensor, bias: Tensor | None = None
    ) -> None:
        self.keys_values = keys_values
        self.bias = with_own(padding_bias(attention_mask), bias)
        self.weights: dict[int, Tensor] = {}

    def fold(self, x: Tensor) -> Tensor:
        """Return rows (B * K, T, E) as (B, K * T, E)."""
        return x.reshape(self.keys_values[0][0].shape[0], -1, x.shape[-1])

    def pair(self, layer: int) -> KeyValue:
        """Return the keys and values that a layer sees."""
        return self.keys_values[layer % len(self.keys_values)]

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Return the attention of q (B, H, K * T, D) over the source, of the same shape."""
        k, v = self.pair(layer)
        self.weights[layer] = attention_weights(q, k, self.bias, dropout=self.dropout)
        return torch.matmul(self.weights[layer], v)


def padding_bias(attention_mask: Tensor) -> Tensor:
    """Return a mask (B, T) of 1 and 0 as (B, 1, 1, T) to add to scores."""
    return torch.where(attention_mask.bool()[:, None, None, :], 0.0, MASKED)


def with_own(bias: Tensor, own: Tensor | None) -> Tensor:
    return bias if own is None else bias + own


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kind: AttentionKind = PLAIN, dropout: float = 0.0
) -> Tensor:
    """Compute softmax(q k^T / sqrt(D) + bias) v, as in "Attention Is All You Need" (3.2.1).

    Args:
        q: (B, H, T, D)
        k, v: (B, K, S, D)
        bias: broadcastable to (B, 1, T, S), or to (B, H, T, S) where K is H; 0 keeps, `MASKED` drops.
        dropout: the share of the weights that are dropped.

    Returns:
        (B, H, T, D)
    """
    K = k.shape[1]
    if q.shape[1] == K:
        return torch.matmul(attention_weights(q, k, bias, kind, dropout), v)
    B, H, T, D = q.shape
    grouped = q.view(B, K, H // K, T, D)
    shared = None if bias is None else bias[:, :, None]
    weights = attention_weights(grouped, k[:, :, None], shared, kind, dropout)  # (B, K, H / K, T, S)
    return torch.matmul(weights, v[:, :, None]).reshape(B, H, T, D)


def attention_weights(
    q: Tensor, k: Tensor, bias: Tensor | None, kind: AttentionKind = PLAIN, dropout: float = 0.0
) -> Tensor:
    """Return the attention weights (B, H, T, S) of q (B, H, T, D) over k (B, H, S, D)."""
    scale = q.shape[-1] ** -0.5 if kind.scale is None else kind.scale
    scores = (q * scale) @ k.mT  # (B, H, T, S)
    if kind.softcap is not None:
        scores = torch.tanh(scores / kind.softcap) * kind.softcap
    if bias is not None:
        scores = scores + bias
    weights: Tensor = scores.softmax(dim=-1)
    return F.dropout(weights, dropout) if dropout else weights


def empty_past(sizes: tuple[int, int, int], batch: int, like: Tensor) -> list[KeyValue]:
    """Return a past of no tokens: a pair of (B, K, 0, D) for each layer, of the type of `like`.

    `sizes` are the number of layers, K and D.
    """
    layers, heads, head_size = sizes
    return [(like.new_zeros(batch, heads, 0, head_size),) * 2 for _ in range(layers)]
