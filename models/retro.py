"""RETRO (Borgeaud et al., 2022, arXiv 2112.04426): a language model that reads neighbours of its text.

A text is cut into chunks. For each complete chunk a database gives its nearest neighbours, each with the text
that follows it. An encoder reads them beside the chunk, and some layers of the decoder attend to what it
gives: from the last token of the chunk to the last but one of the next. No token sees neighbours that were
found by what comes later.

Positions are rotary, where the paper has Transformer-XL's relative ones.

B batch, T tokens, L complete chunks, M tokens of a chunk, K neighbours of a chunk, R tokens of a neighbour,
G = B * L, E hidden size, N encoder's width, H heads, D head size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .activations import ACTIVATIONS
from .attention import (
    AttentionCache,
    DynamicCache,
    KeyValue,
    PaddedAttention,
    empty_past,
    padding_bias,
    scaled_dot_product_attention,
)
from .masked import MASKED
from .retro_config import RetroConfig
from .rotary import RotaryTables


class Attention(nn.Module):
    """Multi-head attention with its norm; queries of one width, keys and values of another or the same."""

    def __init__(
        self, config: RetroConfig, width: int, heads: int, head_size: int, source: int | None = None
    ) -> None:
        super().__init__()
        self.heads = heads
        inner = heads * head_size
        self.norm = config.make_norm(width)
        self.query = nn.Linear(width, inner, bias=config.bias)
        self.key = nn.Linear(source or width, inner, bias=config.bias)
        self.value = nn.Linear(source or width, inner, bias=config.bias)
        self.output = nn.Linear(inner, width, bias=config.bias)

    def split(self, x: Tensor) -> Tensor:
        """Return (B, T, H * D) as (B, H, T, D)."""
        B, T, _ = x.shape
        return x.view(B, T, self.heads, -1).transpose(1, 2)

    def merge(self, context: Tensor) -> Tensor:
        """Return heads (B, H, T, D), joined and projected, as (B, T, E)."""
        B, H, T, D = context.shape
        return self.output(context.transpose(1, 2).reshape(B, T, H * D))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, layer: int, cache: AttentionCache, tables: RotaryTables) -> Tensor:
        """Return x (B, T, E) plus its attention to itself."""
        normed = self.norm(x)
        query, key, value = (self.split(part(normed)) for part in (self.query, self.key, self.value))
        query = cache.rotate(query, tables)
        key = cache.rotate(key, tables)
        return x + self.merge(cache.attend(layer, query, key, value))


class CrossAttention(Attention):
    """Attention to another sequence, whose keys and values are computed before."""

    def forward(  # type: ignore[override]
        self, x: Tensor, source: KeyValue, bias: Tensor | None, tables: RotaryTables | None, positions: Tensor
    ) -> Tensor:
        """Return the attention (B, T, E) of x (B, T, E) to keys and values (B, H, S, D).

        Queries are turned by positions (B, T) where there are tables; `bias` (B, 1, 1, S) hides padding.
        """
        query = rotate(self.split(self.query(self.norm(x))), tables, positions)
        return self.merge(scaled_dot_product_attention(query, *source, bias))

    def keys_values(self, source: Tensor, tables: RotaryTables | None, positions: Tensor) -> KeyValue:
        """Return keys and values (B, H, S, D) of a source (B, S, ...) with positions (1, S)."""
        return rotate(self.split(self.key(source)), tables, positions), self.split(self.value(source))


def rotate(x: Tensor, tables: RotaryTables | None, positions: Tensor) -> Tensor:
    return x if tables is None else tables.rotate(x, positions)


class FeedForward(nn.Module):
    """Two linear maps with an activation between, and their norm."""

    def __init__(self, config: RetroConfig, width: int, inner: int) -> None:
        super().__init__()
        self.norm = config.make_norm(width)
        self.inner = nn.Linear(width, inner, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]()
        self.output = nn.Linear(inner, width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.output(self.activation(self.inner(self.norm(x))))  # type: ignore[no-any-return]


class NeighbourAttention(PaddedAttention):
    """Attention of tokens to those of the same neighbour; its positions begin anew in each.

    Args:
        attention_mask: (G, K * R), one neighbour behind the other.
        neighbours: K.
    """

    def __init__(self, attention_mask: Tensor, neighbours: int) -> None:
        super().__init__(attention_mask)
        self.neighbours = neighbours

    def count_positions(self) -> Tensor:
        """Return position ids (1, K * R)."""
        mask = self.attention_mask
        return torch.arange(mask.shape[1] // self.neighbours, device=mask.device).repeat(self.neighbours)[
            None
        ]

    def make_bias(self, window: int | None) -> Tensor:
        """Return the mask (G, 1, K * R, K * R) of padding and other neighbours."""
        length = self.attention_mask.shape[1] // self.neighbours
        number = torch.arange(self.attention_mask.shape[1], device=self.attention_mask.device) // length
        return torch.where(number[:, None] == number, padding_bias(self.attention_mask), MASKED)


class NeighbourLayer(nn.Module):
    """A layer of the encoder; some attend to the chunk whose neighbours are read."""

    def __init__(self, config: RetroConfig, layer: int) -> None:
        super().__init__()
        width = config.encoder_size
        heads = config.encoder_heads
        size = config.encoder_head_size
        self.number = layer
        self.cross_positions = config.cross_positions
        self.attention = Attention(config, width, heads, size)
        self.cross = (
            CrossAttention(config, width, heads, size, source=config.hidden_size)
            if layer in config.encoder_cross_layers
            else None
        )
        self.feed_forward = FeedForward(config, width, config.encoder_intermediate_size)

    def forward(
        self, x: Tensor, chunk: Tensor, attention: NeighbourAttention, tables: RotaryTables
    ) -> Tensor:
        """Return the next states (G, K * R, N) of neighbours x, beside their chunk (G, M, E)."""
        x = self.attention(x, self.number, attention, tables)
        if self.cross is not None:
            turned = tables if self.cross_positions else None
            places = torch.arange(chunk.shape[1], device=x.device)[None]
            source = self.cross.keys_values(chunk, turned, places)
            x = x + self.cross(x, source, None, turned, attention.count_positions())
        return self.feed_forward(x)  # type: ignore[no-any-return]


class NeighbourEncoder(nn.Module):
    """Reads the neighbours of chunks, each by itself, beside the chunk that they were found by."""

    def __init__(self, config: RetroConfig) -> None:
        super().__init__()
        self.config = config
        if config.encoder_words:
            self.words = nn.Embedding(config.vocab_size, config.encoder_size)
        self.chunk_norm = config.make_norm(config.hidden_size)
        self.layers = nn.ModuleList(NeighbourLayer(config, layer) for layer in range(config.encoder_layers))
        self.norm = config.make_norm(config.encoder_size)
        longest = max(config.neighbour_length, config.chunk_length)
        self.tables = config.make_tables(config.encoder_head_size, longest)

    def forward(self, x: Tensor, mask: Tensor, chunk: Tensor) -> Tensor:
        """Return the states (G, K * R, N) of embedded neighbours.

        Args:
            x: (G, K * R, N), one neighbour behind the other.
            mask: (G, K * R), 1 at tokens and 0 at padding.
            chunk: (G, M, E), what the decoder has of the chunk in its first layer that attends to neighbours.
        """
        attention = NeighbourAttention(mask, self.config.neighbours)
        attention.positions(mask)
        chunk = self.chunk_norm(chunk)
        for layer in self.layers:
            x = layer(x, chunk, attention, self.tables)
        return self.norm(x)  # type: ignore[no-any-return]


class Neighbours(Protocol):
    """Gives a pass over tokens the neighbours that it sees: a whole text's, or those known by now."""

    def read(self, x: Tensor) -> None:
        """Take in x (B, T, E), what the encoder reads of these tokens."""
        ...

    def attend(self, number: int, cross: CrossAttention, x: Tensor, places: Tensor) -> Tensor:
        """Return the attention (B, T, E) of x (B, T, E) to neighbours, by the cross-attention of a number.

        `places` (B, T) are the tokens' positions behind the beginning of the chunk that they see neighbours
        of.
        """
        ...


class KnownNeighbours:
    """Neighbours of one chunk for each row, which every token of a step sees.

    Args:
        keys_values: keys and values (B, H, K * R, D) of each layer that attends to them.
        mask: (B, K * R), 1 at tokens and 0 at padding; a row without any token sees nothing.
        tables: the rotations of queries, if there are positions.

    After a pass `chunk` holds what the encoder reads of its tokens, (B, T, E).
    """

    chunk: Tensor

    def __init__(self, keys_values: Sequence[KeyValue], mask: Tensor, tables: RotaryTables | None) -> None:
        self.keys_values = keys_values
        self.bias = padding_bias(mask)
        self.has_any = mask.to(self.bias.dtype).amax(dim=1)[:, None, None]  # (B, 1, 1)
        self.tables = tables

    def read(self, x: Tensor) -> None:
        self.chunk = x

    def attend(self, number: int, cross: CrossAttention, x: Tensor, places: Tensor) -> Tensor:
        seen: Tensor = cross(x, self.keys_values[number], self.bias, self.tables, places)
        return seen * self.has_any


class TextNeighbours:
    """The neighbours of all complete chunks of a text that is read at once.

    Args:
        model: whose encoder reads them.
        ids: (B, L, K, R) int64.
        mask: (B, L, K, R), 0 at padding.
    """

    def __init__(self, model: Retro, ids: Tensor, mask: Tensor) -> None:
        self.model = model
        self.ids = ids.flatten(0, 1).flatten(1)  # (B * L, K * R)
        self.mask = mask.flatten(0, 1).flatten(1)
        self.chunks = ids.shape[1]
        self.known: KnownNeighbours | None = None

    def read(self, x: Tensor) -> None:
        M = self.model.config.chunk_length
        if self.chunks:
            chunk = x[:, : self.chunks * M].reshape(-1, M, x.shape[-1])
            keys_values = self.model.encode(self.ids, self.mask, chunk)
            self.known = KnownNeighbours(keys_values, self.mask, self.model.query_tables)

    def attend(self, number: int, cross: CrossAttention, x: Tensor, places: Tensor) -> Tensor:
        if self.known is None:
            return torch.zeros_like(x)
        M = self.model.config.chunk_length
        B, T, E = x.shape
        seeing = T - (M - 1)  # tokens from the end of the first chunk on
        windows = F.pad(x[:, M - 1 :], (0, 0, 0, self.chunks * M - seeing)).reshape(-1, M, E)
        seen = self.known.attend(number, cross, windows, torch.arange(M, device=x.device)[None] + M - 1)
        seen = seen.reshape(B, self.chunks * M, E)[:, :seeing]
        return F.pad(seen, (0, 0, M - 1, 0))


class RetroLayer(nn.Module):
    """A layer of the decoder; some attend to neighbours."""

    def __init__(self, config: RetroConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        heads = config.num_attention_heads
        size = config.head_size
        self.number = layer
        self.is_read = layer == config.cross_layers[0]
        self.cross_number = config.cross_layers.index(layer) if layer in config.cross_layers else 0
        self.attention = Attention(config, width, heads, size)
        self.cross = (
            CrossAttention(config, width, heads, size, source=config.encoder_size)
            if layer in config.cross_layers
            else None
        )
        self.feed_forward = FeedForward(config, width, config.intermediate_size)

    def forward(
        self,
        x: Tensor,
        cache: AttentionCache,
        tables: RotaryTables,
        neighbours: Neighbours,
        places: Tensor,
    ) -> Tensor:
        """Return the next states (B, T, E); see `Neighbours.attend` for `places`."""
        x = self.attention(x, self.number, cache, tables)
        if self.is_read:
            neighbours.read(x)
        if self.cross is not None:
            x = x + neighbours.attend(self.cross_number, self.cross, x, places)
        return self.feed_forward(x)  # type: ignore[no-any-return]


class Retro(nn.Module):
    """A decoder that reads neighbours, and their encoder."""

    def __init__(self, config: RetroConfig) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.encoder = NeighbourEncoder(config)
        self.layers = nn.ModuleList(RetroLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = config.make_norm(config.hidden_size) if config.final_norm else nn.Identity()
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=config.output_bias)
        self.tables = config.make_tables(config.head_size, config.max_positions)
        longest = max(config.neighbour_length, 2 * config.chunk_length)
        self.cross_tables = config.make_tables(config.head_size, longest)
        self.tie_weights()

    @property
    def query_tables(self) -> RotaryTables | None:
        """The rotations of the attention to neighbours, if it has positions."""
        return self.cross_tables if self.config.cross_positions else None

    def tie_weights(self) -> None:
        """Tie the output's weight to the embedding, where the config says so."""
        if self.config.tie_word_embeddings:
            self.output.weight = self.words.weight

    def limit_context(self, length: int) -> None:
        """Compute the rotations of texts of up to `length` tokens."""
        self.tables.fill(length)

    def forward(
        self, input_ids: Tensor, neighbour_ids: Tensor | None = None, neighbour_mask: Tensor | None = None
    ) -> Tensor:
        """Return the logits (B, T, V) of the token after each one, as in training.

        Args:
            input_ids: (B, T) int64, without padding.
            neighbour_ids: (B, L, K, R) int64, of each of the T // M complete chunks; None without neighbours.
            neighbour_mask: (B, L, K, R), 0 at padding; None where there is none. A chunk without any token of
                a neighbour reads none.

        Raises:
            ValueError: another number of chunks.
        """
        B, T = input_ids.shape
        config = self.config
        shape = (B, T // config.chunk_length, config.neighbours, config.neighbour_length)
        if neighbour_ids is None:
            neighbour_ids = input_ids.new_zeros(B, 0, *shape[2:])
        elif neighbour_ids.shape != shape:
            raise ValueError(
                f"neighbour_ids has shape {tuple(neighbour_ids.shape)}; {T} tokens of {B} rows have {shape}"
            )
        if neighbour_mask is None:
            neighbour_mask = torch.ones_like(neighbour_ids)
        cache = DynamicCache(self.empty_past(B), torch.ones_like(input_ids))
        neighbours = TextNeighbours(self, neighbour_ids, neighbour_mask)
        return self.logits(self.hidden_states(input_ids, cache, neighbours))

    def encode(self, ids: Tensor, mask: Tensor, chunk: Tensor) -> list[KeyValue]:
        """Return keys and values (G, H, K * R, D) of neighbours (G, K * R) for each layer that reads them.

        `chunk` (G, M, E) is what `Neighbours.read` got of the chunk.
        """
        words = self.encoder.words if self.config.encoder_words else self.words
        states = self.encoder(words(ids), mask, chunk)
        own = NeighbourAttention(mask, self.config.neighbours).count_positions()
        layers = [layer for layer in self.layers if isinstance(layer, RetroLayer)]
        crosses = [layer.cross for layer in layers if layer.cross is not None]
        return [cross.keys_values(states, self.query_tables, own) for cross in crosses]

    def hidden_states(self, input_ids: Tensor, cache: AttentionCache, neighbours: Neighbours) -> Tensor:
        """Return the last hidden states (B, T, E), which the output reads, of input_ids (B, T)."""
        M = self.config.chunk_length
        positions = cache.positions(input_ids)
        places = (positions + 1) % M + (M - 1)
        x = self.words(input_ids)  # (B, T, E)
        for layer in self.layers:
            x = layer(x, cache, self.tables, neighbours, places)
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., E)."""
        return self.output(x)  # type: ignore[no-any-return]

    def empty_past(self, batch: int) -> list[KeyValue]:
        """Return a past of no tokens, for `batch` rows."""
        return empty_past(self.config.cache_sizes, batch, self.words.weight)
