"""Dropout is there in training mode alone; test_training.py checks its places against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from planforge.models import GPT2, GPT2Config, Recurrent, RecurrentConfig
from planforge.models.dropout import add_dropout
from planforge.models.recurrent import SourceMemory

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


def test_recurrent_layers_drop_where_pytorchs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is dropped, between layers as by nn.GRU(dropout=1): words and the output too, but no state."""
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, rate, training: x * 0 if training else x)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embedding_size": 6, "encoder_size": 5, "decoder_size": 5, "attention": "none"}
    sizes |= {"encoder_layers": 2, "decoder_layers": 2, "bidirectional": False, "bridge": "copy"}
    model = Recurrent(RecurrentConfig(9, 9, **sizes))
    encoder = nn.GRU(6, 5, num_layers=2, batch_first=True, dropout=1.0)
    decoder = nn.GRU(6, 5, num_layers=2, batch_first=True, dropout=1.0)
    for layer in range(2):
        model.encoder[layer].copy_from(encoder, layer)  # type: ignore[operator]
        cell = nn.GRUCell(5 if layer else 6, 5)
        cell.load_state_dict(
            {
                n.removesuffix(f"_l{layer}"): p
                for n, p in decoder.named_parameters()
                if n.endswith(f"_l{layer}")
            }
        )
        model.cells[layer].copy_from(cell)  # type: ignore[operator]
    add_dropout(model, 0.5)
    model.train()
    sources = torch.tensor([[3, 4, 5], [6, 7, 8]])
    _, states = model.encode(sources, torch.tensor([3, 3]))
    _, last = encoder(torch.zeros(2, 3, 6))
    torch.testing.assert_close(torch.stack([state[:, 0] for state in states]), last)
    assert last.abs().min() > 0
    _, after = model.step(torch.tensor([[1], [2]]), states, SourceMemory())
    _, last = decoder(torch.zeros(2, 1, 6), last)
    torch.testing.assert_close(torch.stack([state[:, 0] for state in after]), last)
    logits = model(sources, torch.tensor([[1, 2], [3, 4]]))
    torch.testing.assert_close(logits, model.output.bias.expand_as(logits))
    assert not torch.equal(model.eval()(sources, torch.tensor([[1, 2], [3, 4]])), logits)


@pytest.mark.parametrize("share", [1.0, -0.1, float("nan")])
def test_a_share_that_cannot_be_dropped_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"attention=.* must be at least 0 and below 1"):
        add_dropout(nn.Linear(2, 2), attention=share)


def test_a_model_without_places_for_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match="a Linear has no place for dropout"):
        add_dropout(nn.Linear(2, 2))
