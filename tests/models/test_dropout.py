"""Dropout is there in training mode alone; test_training.py checks its places against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planforge.models import GPT2, GPT2Config
from planforge.models.dropout import add_dropout

IDS = torch.arange(24).reshape(2, 12)


def test_dropout_ends_with_the_training() -> None:
    model = GPT2(GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4))
    before = model(IDS)[0]
    hooks = add_dropout(model, 0.3)
    assert torch.equal(model.eval()(IDS)[0], before)
    assert not torch.equal(model.train()(IDS)[0], before)
    for hook in hooks:
        hook.remove()
    assert torch.equal(model(IDS)[0], before)


@pytest.mark.parametrize("share", [1.0, -0.1, float("nan")])
def test_a_share_that_cannot_be_dropped_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"attention=.* must be at least 0 and below 1"):
        add_dropout(nn.Linear(2, 2), attention=share)


def test_a_model_without_places_for_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match="a Linear has no place for dropout"):
        add_dropout(nn.Linear(2, 2))
