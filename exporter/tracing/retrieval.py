"""A decoder that reads neighbours, and their encoder, with the inputs and outputs of their graphs.

B rows, T new tokens, K neighbours of a chunk, R tokens of a neighbour, M tokens of a chunk, E hidden size,
N logit rows
"""

from __future__ import annotations

from torch import Tensor, nn

from ...models import DynamicCache, Retro
from ...models.retro import KnownNeighbours
from .dialects import GroupQueryCache, StaticCache, pair_up


class NeighbourEncoder(nn.Module):
    """Reads the neighbours of a chunk for each row; returns the keys and values of the decoder's layers."""

    def __init__(self, model: Retro) -> None:
        super().__init__()
        self.model = model

    def forward(self, neighbour_ids: Tensor, neighbour_mask: Tensor, chunk: Tensor) -> tuple[Tensor, ...]:
        """Return the recipe's outputs for (B, K * R), (B, K * R) and (B, M, E)."""
        pairs = self.model.encode(neighbour_ids, neighbour_mask, chunk)
        return tuple(tensor for pair in pairs for tensor in pair)


class RetrievalDecoder(nn.Module):
    """A step of tokens that all see the same neighbours, those of the last complete chunk."""

    def __init__(self, model: Retro) -> None:
        super().__init__()
        self.model = model
        self.crosses = len(model.config.cross_layers)

    def outputs(
        self,
        input_ids: Tensor,
        cache: DynamicCache | StaticCache,
        pairs: list[tuple[Tensor, Tensor]],
        mask: Tensor,
        logit_rows: Tensor,
    ) -> tuple[Tensor, ...]:
        neighbours = KnownNeighbours(pairs, mask, self.model.query_tables)
        x = self.model.hidden_states(input_ids, cache, neighbours)  # (B, T, E)
        logits = self.model.logits(x.flatten(0, 1)[logit_rows])
        present = [tensor for pair in cache.present for tensor in pair]
        return (logits, *present, neighbours.chunk)


class PortableRetrieval(RetrievalDecoder):
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        logit_rows: Tensor,
        neighbour_mask: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        pairs = pair_up(rest)
        cache = DynamicCache(pairs[self.crosses :], attention_mask, position_ids)
        return self.outputs(input_ids, cache, pairs[: self.crosses], neighbour_mask, logit_rows)


class InplaceRetrieval(RetrievalDecoder):
    def forward(
        self,
        input_ids: Tensor,
        past_lengths: Tensor,
        logit_rows: Tensor,
        neighbour_mask: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        pairs = pair_up(rest)
        cache = StaticCache(pairs[self.crosses :], past_lengths)
        return self.outputs(input_ids, cache, pairs[: self.crosses], neighbour_mask, logit_rows)


class OrtRetrieval(RetrievalDecoder):
    def forward(
        self,
        input_ids: Tensor,
        past_lengths: Tensor,
        total_sequence_length: Tensor,
        logit_rows: Tensor,
        neighbour_mask: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        pairs = pair_up(rest)
        cache = GroupQueryCache(pairs[self.crosses :], past_lengths, total_sequence_length)
        return self.outputs(input_ids, cache, pairs[: self.crosses], neighbour_mask, logit_rows)
