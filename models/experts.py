"""Mixtures of experts (Shazeer et al., 2017; Mixtral, 2024): an MLP of which each token uses a part.

R rows (tokens), N experts, k experts of each row, E hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Split = Callable[[Tensor, Tensor], Sequence[Tensor]]
Join = Callable[[Sequence[Tensor], Tensor], Tensor]


def split_rows(rows: Tensor, counts: Tensor) -> Sequence[Tensor]:
    """Return rows (R, E) in N parts, as many of them in each as `counts` (N,) says."""
    return torch.split(rows, counts.tolist())


def join_rows(parts: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return parts one behind the other, as many as `rows` (R, E)."""
    return torch.cat(list(parts))


class Experts(nn.Module):
    """A router and its experts: each row is the weighted sum of the k experts with the largest shares.

    Args:
        make_expert: returns an MLP.
        width: E.
        count: N.
        chosen: k.
        normalizes: whether the k shares are scaled to a sum of 1.

    Attributes:
        computes_all: whether every expert computes every row; else each computes the rows that chose it.
        split: of rows into those of each expert; another one writes a node of ONNX.
        join: the reverse.
    """

    def __init__(
        self, make_expert: Callable[[], nn.Module], width: int, count: int, chosen: int, normalizes: bool
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(make_expert() for _ in range(count))
        self.chosen = chosen
        self.normalizes = normalizes
        self.computes_all = False
        self.split: Split = split_rows
        self.join: Join = join_rows

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixed results (B, T, E) of x (B, T, E)."""
        rows = x.flatten(0, 1)  # (R, E)
        shares, chosen = self.gate(rows).softmax(-1).topk(self.chosen, dim=-1)  # (R, k)
        if self.normalizes:
            shares = shares / shares.sum(-1, keepdim=True)
        mix = self.mix_all if self.computes_all else self.mix_chosen
        return mix(rows, shares, chosen).view(x.shape)

    def mix_all(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Return the sums (R, E) of what all experts compute, by shares that are 0 for most of them."""
        every = torch.arange(len(self.experts), device=rows.device)
        shares = torch.where(chosen[:, :, None] == every, shares[:, :, None], 0.0).sum(1)  # (R, N)
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mixed = mixed + shares[:, number, None] * expert(rows)
        return mixed

    def mix_chosen(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Return the sums (R, E) of what each row's own experts compute.

        Rows are sorted by their experts, so that each expert multiplies its own at once.
        """
        flat = chosen.flatten()  # (R * k,)
        every = torch.arange(len(self.experts), device=rows.device)
        counts = (flat[:, None] == every).sum(0)  # (N,)
        places = torch.arange(flat.shape[0], device=rows.device)
        order = (flat * flat.shape[0] + places).argsort()  # by expert, then by row
        sorted_rows = rows[order // self.chosen]  # (R * k, E)
        parts = self.split(sorted_rows, counts)
        results = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        joined = self.join(results, sorted_rows)[order.argsort()]  # (R * k, E), by row again
        return (joined.view(*chosen.shape, -1) * shares[:, :, None]).sum(1)
