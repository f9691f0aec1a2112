"""Computes attention of long texts in PyTorch, some queries at a time.

B batch, T new tokens, S cached and new tokens, H heads of queries, K heads of keys and values, D head size
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...models import DynamicCache
from ...models.attention import AttentionKind, scaled_dot_product_attention

# Of the scores that are computed at once: those of a whole context may take gigabytes, and 64 MB half as long
# again as this, which a processor's cache holds.
SCORE_BYTES = 2**23


class PiecewiseCache(DynamicCache):
    """A cache that computes the same as `DynamicCache`, in little memory."""

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind) -> Tensor:
        B, H, T, _ = q.shape
        S = k.shape[2]
        step = max(1, SCORE_BYTES // (B * H * S * q.element_size()))
        bias = self.biases[kind.window]  # (B, 1, T, S)
        pieces = [
            scaled_dot_product_attention(q[:, :, i : i + step], k, v, bias[:, :, i : i + step], kind)
            for i in range(0, T, step)
        ]
        return torch.cat(pieces, dim=2)
