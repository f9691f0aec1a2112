"""Recurrent sequence to sequence: GRU or LSTM, with a fixed context or with attention.

The parts are those of Sutskever et al., 2014 (arXiv 1409.3215), Cho et al., 2014 (1406.1078), Bahdanau et
al., 2014 (1409.0473) and Luong et al., 2015 (1508.04025).

B sources, S source tokens, R = B * K rows of the decoder, K of them (its beams) for each source, T target
tokens, V target vocabulary, D directions, H width of a state, G gates, M width of the memory, A of its keys
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from .config_checks import check_bool, check_whole
from .masked import MASKED
from .recurrent_layers import GATES, GRUCell, LSTMCell, PlainRecurrence, Recurrence, RecurrentLayer, States

BRIDGES = ("copy", "linear", "tanh")
SCORES = ("none", "additive", "dot", "general")
TIMES = ("before", "after")


@dataclass(frozen=True)
class RecurrentConfig:
    """The settings of a recurrent encoder-decoder; the defaults are Bahdanau's attention over two directions.

    Attributes:
        cell: "gru" or "lstm".
        encoder_size: H of each direction of the encoder.
        bidirectional: the encoder reads both ways; its states are joined, forwards first.
        decoder_size: H of the decoder.
        bridge: how the encoder's last states become the decoder's first: "copy", "linear", or "tanh" of it.
            Layers are matched from the top.
        attention: "none", or the scores: "additive" v tanh(Wa s + Ua h), "dot" s h, "general" s Wa h.
        attention_size: A of additive scores.
        attend: "before" a step, by the state that it begins with, so that the step reads the context
            (Bahdanau); or "after" it, by its result, which both become tanh(Wc [context; s]) (Luong).
        input_feeding: that vector is also read by the next step; only with "after".
        feed_context: without attention, each step also reads the encoder's last state (Cho).
        deep_output: logits read the context and the word as well as the state; not with "after".
        max_positions: the most tokens of a source or target that an export takes; the model has no limit.
    """

    source_vocab_size: int = 30000
    target_vocab_size: int = 30000
    embedding_size: int = 620
    cell: str = "gru"
    encoder_size: int = 1000
    encoder_layers: int = 1
    bidirectional: bool = True
    decoder_size: int = 1000
    decoder_layers: int = 1
    bridge: str = "tanh"
    attention: str = "additive"
    attention_size: int = 1000
    attend: str = "before"
    input_feeding: bool = False
    feed_context: bool = False
    deep_output: bool = True
    max_positions: int = 256
    is_recurrent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole(self, "source_vocab_size", "target_vocab_size", "embedding_size", "max_positions")
        check_whole(
            self, "encoder_size", "encoder_layers", "decoder_size", "decoder_layers", "attention_size"
        )
        check_bool(self, "bidirectional", "input_feeding", "feed_context", "deep_output")
        choices = {"cell": tuple(GATES), "bridge": BRIDGES, "attention": SCORES, "attend": TIMES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        self._check_widths()
        if self.feed_context and self.has_attention:
            raise ValueError(f"feed_context is for attention='none', not for {self.attention!r}")
        if self.attends_after and self.deep_output:
            raise ValueError("deep_output must be false with attend='after', whose output reads the context")
        if self.input_feeding and not self.attends_after:
            raise ValueError("input_feeding needs attention with attend='after'")

    def _check_widths(self) -> None:
        """Refuse widths that must be equal and are not."""
        same = []
        if self.bridge == "copy":
            same.append("bridge='copy'")
        if self.attention == "dot":
            same.append("attention='dot'")
        if same and self.memory_size != self.decoder_size:
            raise ValueError(
                f"{same[0]} needs decoder_size={self.memory_size}, the width of the encoder's states, not"
                f" {self.decoder_size}"
            )

    @property
    def vocab_size(self) -> int:
        """Return the target's vocabulary size, as the target is generated."""
        return self.target_vocab_size

    @property
    def memory_size(self) -> int:
        """Return M, the width of the encoder's states, both directions joined."""
        return self.encoder_size * self.directions

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def has_attention(self) -> bool:
        return self.attention != "none"

    @property
    def attends_after(self) -> bool:
        return self.has_attention and self.attend == "after"

    @property
    def key_size(self) -> int | None:
        """Return A, the width of the keys; None where the memory itself is compared, or nothing is."""
        return {"additive": self.attention_size, "general": self.decoder_size}.get(self.attention)

    @property
    def context_size(self) -> int:
        """Return the width of the context that each step reads besides a word; 0 where it reads none."""
        return self.memory_size if self.has_attention or self.feed_context else 0

    @property
    def state_names(self) -> tuple[str, ...]:
        """Return the names of the decoder's states, in the order of `States`."""
        parts = ("hidden", "cell") if self.cell == "lstm" else ("hidden",)
        names = [f"{layer}.{part}" for layer in range(self.decoder_layers) for part in parts]
        return (*names, "feed") if self.input_feeding else tuple(names)


@dataclass
class SourceMemory:
    """What the decoder reads of its sources; K rows of the decoder that are adjacent share one.

    Attributes:
        mask: (B, S), true or 1 where a source token counts; None without attention.
        memory: (B, S, M), the encoder's states; None without attention.
        keys: (B, S, A), what scores compare a state with; None where that is the memory itself.
        context: (B, 1, M), the fixed context that each step reads; None where it reads none.
        weights: of the last step (B, K, S), once it was computed with attention.
    """

    mask: Tensor | None = None
    memory: Tensor | None = None
    keys: Tensor | None = None
    context: Tensor | None = None
    weights: Tensor | None = None

    def list_tensors(self) -> list[Tensor]:
        """Return what the encoder computed for every step: memory and keys, or context."""
        return [tensor for tensor in (self.memory, self.keys, self.context) if tensor is not None]


class Attention(nn.Module):
    """Attention over a source by additive, dot or general scores."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.scores = config.attention
        if config.key_size is not None:  # general scores have s (Wa h), where Wa h are the keys
            self.key = nn.Linear(config.memory_size, config.key_size, bias=config.attention == "additive")
        if config.attention == "additive":
            self.query = nn.Linear(config.decoder_size, config.attention_size, bias=False)
            self.score = nn.Linear(config.attention_size, 1, bias=False)

    def forward(self, state: Tensor, source: SourceMemory) -> Tensor:
        """Return the context (R, 1, M) of a state (R, 1, H); `source` keeps the weights."""
        assert source.memory is not None and source.mask is not None
        B, _, M = source.memory.shape
        keys = source.memory if source.keys is None else source.keys
        if self.scores == "additive":
            query = self.query(state)
            query = query.view(B, -1, 1, query.shape[-1])  # (B, K, 1, A)
            scores = self.score(torch.tanh(keys[:, None] + query)).squeeze(-1)
        else:
            scores = state.view(B, -1, state.shape[-1]) @ keys.mT  # (B, K, S)
        scores = torch.where(source.mask.bool()[:, None], scores, MASKED)
        source.weights = scores.softmax(dim=-1)
        return (source.weights @ source.memory).reshape(-1, 1, M)


class Recurrent(nn.Module):
    """The recurrent encoder-decoder."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        E = config.embedding_size
        H = config.decoder_size
        M = config.memory_size
        self.source_words = nn.Embedding(config.source_vocab_size, E)
        self.target_words = nn.Embedding(config.target_vocab_size, E)
        self.encoder = nn.ModuleList(
            RecurrentLayer(config.cell, M if layer else E, config.encoder_size, config.directions)
            for layer in range(config.encoder_layers)
        )
        states = len(config.state_names) - config.input_feeding
        bridged = 0 if config.bridge == "copy" else states
        self.bridges = nn.ModuleList(nn.Linear(M, H) for _ in range(bridged))
        self.attention = Attention(config) if config.has_attention else None
        read = H if config.attends_after else config.context_size
        first = E + (H if config.input_feeding else 0 if config.attends_after else config.context_size)
        cell = GRUCell if config.cell == "gru" else LSTMCell
        self.cells = nn.ModuleList(
            cell(config.cell, H if layer else first, H) for layer in range(config.decoder_layers)
        )
        if config.attends_after:
            self.combine = nn.Linear(M + H, H, bias=False)
        self.output = nn.Linear(H + (read + E if config.deep_output else 0), config.target_vocab_size)

    def tie_weights(self) -> None:
        """Do nothing: no two weights are one."""

    def forward(self, source_ids: Tensor, target_ids: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V) of the token after each target token, as in training.

        Args:
            source_ids: (B, S) int64, padded on the right.
            target_ids: (B, T) int64.
            source_mask: (B, S), 0 at padding; None when there is none.
        """
        source_mask = torch.ones_like(source_ids) if source_mask is None else source_mask
        source, states = self.encode(source_ids, source_mask.sum(dim=1))
        steps = []
        for ids in target_ids.unbind(dim=1):
            x, states = self.step(ids[:, None], states, source)
            steps.append(x)
        return self.output(torch.cat(steps, dim=1))  # type: ignore[no-any-return]

    def encode(
        self, source_ids: Tensor, lengths: Tensor, recurrence: Recurrence | None = None
    ) -> tuple[SourceMemory, States]:
        """Return what the decoder reads of source_ids (B, S), and the states (B, 1, H) that it begins with.

        Args:
            source_ids: (B, S) int64, padded on the right.
            lengths: (B,), from 1 to S: the tokens of each row that are no padding.
            recurrence: how layers are computed; a token after the other by default.
        """
        recurrence = PlainRecurrence() if recurrence is None else recurrence
        x = self.source_words(source_ids)
        for layer in self.encoder:
            x = layer(x, lengths, recurrence)  # (B, S, M)
        source = SourceMemory()
        if self.attention is not None:
            has_keys = self.config.key_size is not None
            mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
            source = SourceMemory(mask, x, self.attention.key(x) if has_keys else None)
        elif self.config.feed_context:
            source = SourceMemory(context=recurrence.last[-1][0])
        return source, self.bridge(recurrence.last)

    def bridge(self, last: Sequence[States]) -> States:
        """Return the decoder's first states (B, 1, H) of the last ones of each layer of the encoder."""
        below = self.config.encoder_layers - self.config.decoder_layers
        layers = range(self.config.decoder_layers)
        states = [part for layer in layers for part in last[max(0, layer + below)]]
        if self.config.bridge != "copy":
            states = [bridge(part) for bridge, part in zip(self.bridges, states, strict=True)]
        if self.config.bridge == "tanh":
            states = [torch.tanh(part) for part in states]
        if self.config.input_feeding:
            states.append(states[0].new_zeros(states[0].shape))
        return states

    def step(self, ids: Tensor, states: Sequence[Tensor], source: SourceMemory) -> tuple[Tensor, States]:
        """Run one step over a target token of each row (R, 1); those of a source are adjacent.

        Returns:
            What the output layer reads (R, 1, ...), and the next states, each (R, 1, H).
        """
        before = list(states)
        words = self.target_words(ids)
        read = [words]
        context = None
        if self.config.input_feeding:
            read.append(before.pop())
        elif self.attention is not None and not self.config.attends_after:
            context = self.attention(self.find_top(before), source)
        elif source.context is not None:
            context = repeat_rows(source.context, len(ids))
        read += [] if context is None else [context]
        x = torch.cat(read, dim=-1) if len(read) > 1 else words
        after: States = []
        size = len(before) // len(self.cells)  # states of a layer
        for layer, cell in enumerate(self.cells):
            new = cell(x, *before[layer * size : (layer + 1) * size])
            after += [new] if isinstance(new, Tensor) else new
            x = after[-size]
        if self.config.attends_after:
            assert self.attention is not None
            x = torch.tanh(self.combine(torch.cat([self.attention(x, source), x], dim=-1)))
            after += [x] if self.config.input_feeding else []
        elif self.config.deep_output:
            x = torch.cat([x, *([] if context is None else [context]), words], dim=-1)
        return x, after

    def find_top(self, states: Sequence[Tensor]) -> Tensor:
        """Return the hidden state of the top layer."""
        return states[-(len(states) // len(self.cells))]


def repeat_rows(x: Tensor, rows: int) -> Tensor:
    """Return (B, 1, M) as (R, 1, M): that of each source for its K adjacent rows."""
    B, _, M = x.shape
    return x[:, None].expand(B, rows // B, 1, M).reshape(rows, 1, M)
