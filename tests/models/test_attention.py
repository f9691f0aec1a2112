"""A cache that is used in another order than a model's own, against PyTorch's attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from planforge.exporter.tracing.dialects import StaticCache
from planforge.models import DynamicCache
from planforge.models.attention import empty_past

B = 2
H = 3
T = 4
P = 5
D = 8


def heads(length: int, seed: int) -> Tensor:
    return torch.randn(B, H, length, D, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("past_length", [0, P])
def test_attention_is_masked_before_positions_are_asked_for(past_length: int) -> None:
    q, k, v = (heads(T, seed) for seed in range(3))
    past = (heads(past_length, 3), heads(past_length, 4))
    mask = torch.ones(B, past_length + T, dtype=torch.int64)
    mask[0, 0] = 0  # padding on the left
    cache = DynamicCache([past], mask)
    visible = torch.ones(T, past_length + T, dtype=torch.bool).tril(past_length) & mask.bool()[:, None, None]
    expected = scaled_dot_product_attention(
        q, torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2), attn_mask=visible
    )
    counts = mask[:, past_length:].bool()
    found = cache.attend(0, q, k, v)
    torch.testing.assert_close(
        found.transpose(1, 2)[counts], expected.transpose(1, 2)[counts], atol=1e-5, rtol=1e-5
    )


def test_a_cache_serves_one_pass() -> None:
    cache = DynamicCache(empty_past((1, H, D), B, torch.zeros(1)), torch.ones(B, T, dtype=torch.int64))
    cache.attend(0, heads(T, 0), heads(T, 1), heads(T, 2))
    with pytest.raises(ValueError, match=r"layer 0 has attended already.*whose past is this one's `present`"):
        cache.attend(0, heads(T, 0), heads(T, 1), heads(T, 2))


def test_slots_are_not_attended_to_without_a_mask() -> None:
    slots = [(torch.zeros(B, H, 16, D), torch.zeros(B, H, 16, D))]
    with pytest.raises(ValueError, match=r"call positions\(\) before attend\(\)"):
        StaticCache(slots, torch.zeros(B, dtype=torch.int64)).attend(0, heads(T, 0), heads(T, 1), heads(T, 2))
