"""Recurrent encoder-decoders: layers against PyTorch's own, each kind of attention, folders, settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from planforge.models import Recurrent, RecurrentConfig, load_model, save_model
from planforge.models.recurrent_layers import GATES, GRUCell, LSTMCell, PlainRecurrence, RecurrentLayer

from ..helpers.models import edit_json
from ..helpers.recurrent import KINDS, TINY, make_recurrent

SOURCES = torch.tensor([[3, 4, 5, 6, 7, 1], [8, 9, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]])
LENGTHS = torch.tensor([6, 3, 1])
MASK = (torch.arange(6) < LENGTHS[:, None]).long()
TARGETS = torch.tensor([[0, 5, 9, 4], [0, 3, 3, 8], [0, 7, 6, 5]])
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def make_rnn(cell: str, *sizes: int, **options: Any) -> nn.GRU | nn.LSTM:
    torch.manual_seed(0)
    rnn = (nn.GRU if cell == "gru" else nn.LSTM)(*sizes, batch_first=True, **options)
    return rnn.requires_grad_(False)


def run_packed(rnn: nn.GRU | nn.LSTM, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return PyTorch's own states (B, S, D * H), and the last ones (layers * D, B, H)."""
    y, last = rnn(pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False))
    padded, _ = pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
    return padded, (last,) if isinstance(last, Tensor) else last


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("directions", [1, 2])
def test_layers_are_pytorchs(cell: str, directions: int) -> None:
    rnn = make_rnn(cell, 5, 7, num_layers=2, bidirectional=directions == 2)
    x = torch.randn(3, 6, 5)
    want, last = run_packed(rnn, x)
    recurrence = PlainRecurrence()
    for number in range(2):
        layer = RecurrentLayer(cell, x.shape[-1], 7, directions)
        layer.copy_from(rnn, number)
        x = layer(x, LENGTHS, recurrence)
    torch.testing.assert_close(x, want, **CLOSE)
    assert len(last) == len(recurrence.last[0]) == (1 if cell == "gru" else 2)
    for number, ends in enumerate(recurrence.last):
        for own, theirs in zip(ends, last, strict=True):
            both = theirs[number * directions : (number + 1) * directions]
            torch.testing.assert_close(own[:, 0], torch.cat(list(both), dim=-1), **CLOSE)


def test_cells_are_pytorchs() -> None:
    x, h, c = torch.randn(4, 5), torch.randn(4, 7), torch.randn(4, 7)
    theirs = nn.GRUCell(5, 7)
    own = GRUCell("gru", 5, 7)
    own.copy_from(theirs)
    torch.testing.assert_close(own(x, h), theirs(x, h), **CLOSE)
    two = nn.LSTMCell(5, 7)
    own_two = LSTMCell("lstm", 5, 7)
    own_two.copy_from(two)
    torch.testing.assert_close(own_two(x, h, c), two(x, (h, c)), **CLOSE)


class Written:
    """The papers' formulas over nn.GRU and nn.LSTM, a source at a time and without padding.

    Its modules' weights are copied into one of ours, whose other layers it reads.
    """

    def __init__(self, model: Recurrent) -> None:
        self.model = model
        c = model.config
        width = {"num_layers": c.encoder_layers, "bidirectional": c.bidirectional}
        self.encoder = make_rnn(c.cell, c.embedding_size, c.encoder_size, **width)
        layers: list[Any] = [*model.encoder]
        for number, layer in enumerate(layers):
            layer.copy_from(self.encoder, number)
        cells: list[Any] = [*model.cells]
        first = cells[0].input.in_features
        self.decoder = make_rnn(c.cell, first, c.decoder_size, num_layers=c.decoder_layers)
        torch.manual_seed(1)
        for number, cell in enumerate(cells):
            kind = nn.GRUCell if c.cell == "gru" else nn.LSTMCell
            one = kind(cell.input.in_features, c.decoder_size)
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                getattr(one, name).data = getattr(self.decoder, f"{name}_l{number}").data
            cell.copy_from(one)

    def compute_logits(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits (T, V) of a target (T,) of a source (S,)."""
        c, model = self.model.config, self.model
        memory, last = self.encoder(functional.embedding(source, model.source_words.weight)[None])
        ends = [last] if c.cell == "gru" else list(last)
        ends = [self.join_directions(end) for end in ends]  # each (layers, M)
        states = [self.bridge(end, part, len(ends)) for part, end in enumerate(ends)]  # (layers, 1, H)
        fed = torch.zeros(c.decoder_size)
        logits = []
        for token in target:
            word = model.target_words.weight[token]
            context = ends[0][-1] if c.feed_context else None
            if c.has_attention and not c.attends_after:
                context = self.attend(states[0][-1, 0], memory[0])
            read = [word, *([fed] if c.input_feeding else [] if context is None else [context])]
            given = states[0] if c.cell == "gru" else tuple(states)
            out, new = self.decoder(torch.cat(read)[None, None], given)
            states = [new] if c.cell == "gru" else list(new)
            top = out[0, 0]
            if c.attends_after:
                fed = top = torch.tanh(model.combine.weight @ torch.cat([self.attend(top, memory[0]), top]))
            elif c.deep_output:
                top = torch.cat([top, *([] if context is None else [context]), word])
            logits.append(model.output.weight @ top + model.output.bias)
        return torch.stack(logits)

    def join_directions(self, end: Tensor) -> Tensor:
        """Return last states (layers * D, 1, H) as (layers, D * H)."""
        return end[:, 0].reshape(self.model.config.encoder_layers, -1)

    def bridge(self, end: Tensor, part: int, parts: int) -> Tensor:
        c = self.model.config
        rows = end[-c.decoder_layers :]
        if c.bridge != "copy":
            layers = [self.model.bridges[layer * parts + part] for layer in range(c.decoder_layers)]
            rows = torch.stack([b.weight @ row + b.bias for b, row in zip(layers, rows, strict=True)])
        return (torch.tanh(rows) if c.bridge == "tanh" else rows)[:, None]

    def attend(self, state: Tensor, memory: Tensor) -> Tensor:
        """Return the context (M,) of a state (H,) over a memory (S, M)."""
        attention = self.model.attention
        assert attention is not None
        if self.model.config.attention == "dot":
            scores = memory @ state
        elif self.model.config.attention == "general":
            scores = (memory @ attention.key.weight.T) @ state
        else:
            inner = memory @ attention.key.weight.T + attention.key.bias + attention.query.weight @ state
            scores = torch.tanh(inner) @ attention.score.weight[0]
        return scores.softmax(0) @ memory


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_formulas_over_pytorchs_modules(kind: str) -> None:
    model = make_recurrent(kind)
    written = Written(model)
    logits = model(SOURCES, TARGETS, MASK)
    for row, (length, target) in enumerate(zip(LENGTHS, TARGETS, strict=True)):
        torch.testing.assert_close(
            logits[row], written.compute_logits(SOURCES[row, :length], target), **CLOSE
        )


def test_rows_of_one_source_share_its_memory() -> None:
    model = make_recurrent()
    source, states = model.encode(SOURCES, LENGTHS)
    beams = [state.repeat_interleave(2, dim=0) for state in states]
    ids = torch.tensor([[4], [5], [6], [7], [8], [9]])
    x, new = model.step(ids, beams, source)
    assert source.weights is not None and source.weights.shape == (3, 2, 6)
    torch.testing.assert_close(source.weights.sum(-1), torch.ones(3, 2))
    assert (source.weights[MASK[:, None].expand(3, 2, 6) == 0] == 0).all()
    for row in range(6):
        alone, own = model.encode(SOURCES[row // 2 : row // 2 + 1], LENGTHS[row // 2 : row // 2 + 1])
        one, after = model.step(ids[row : row + 1], own, alone)
        torch.testing.assert_close(x[row : row + 1], one, **CLOSE)
        torch.testing.assert_close(new[-1][row : row + 1], after[-1], **CLOSE)


def test_all_weights_learn() -> None:
    for kind in KINDS:
        model = make_recurrent(kind).requires_grad_(True)
        model(SOURCES, TARGETS, MASK).square().mean().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters()), kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_loaded(kind: str, tmp_path: Path) -> None:
    model = make_recurrent(kind)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert isinstance(loaded, Recurrent) and loaded.config == model.config
    assert torch.equal(loaded(SOURCES, TARGETS, MASK), model(SOURCES, TARGETS, MASK))


def test_a_folder_whose_sizes_disagree_is_refused(tmp_path: Path) -> None:
    save_model(make_recurrent(), tmp_path)
    edit_json(tmp_path / "config.json", encoder_size=11)
    with pytest.raises(
        ValueError, match=r"shape: encoder\.0\.weight_hidden is \(2, 30, 10\), config.json means"
    ):
        load_model(tmp_path)
    edit_json(tmp_path / "config.json", encoder_size=10, source_vocab_size=29)
    with pytest.raises(ValueError, match="source_vocab_size is 29, the embedding has 30 rows"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell": "rnn"}, "cell='rnn' is not one of gru, lstm"),
        ({"attention": "concat"}, "attention='concat' is not one of none, additive, dot, general"),
        (
            {"bridge": "copy"},
            "bridge='copy' needs decoder_size=20, the width of the encoder's states, not 14",
        ),
        ({"attention": "dot"}, "attention='dot' needs decoder_size=20"),
        ({"feed_context": True}, "feed_context is for attention='none', not for 'additive'"),
        ({"attend": "after"}, "deep_output must be false with attend='after'"),
        ({"input_feeding": True}, "input_feeding needs attention with attend='after'"),
        ({"encoder_layers": 0}, "encoder_layers=0 must be an integer of at least 1"),
        ({"bidirectional": 1}, "bidirectional=1 must be true or false"),
        ({"attend": []}, r"attend=\[\] is not one of before, after"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecurrentConfig(**{**TINY, **changes})
