"""Keeps adapters beside their base model, so that each row of a batch chooses its own.

B rows, T tokens, I inputs and O outputs of a linear layer, N adapters, r the largest rank of a layer
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

FILE = "planforge_adapters.safetensors"  # beside the base model's files
NAMES = "names"  # of the adapters, in the file's metadata


class AdapterChoice:
    """The adapters of a batch's rows while a model runs.

    Attributes:
        slots: (B,) int64, 0 for none, else the adapter's number from 1 on; None where no row has any.
    """

    def __init__(self) -> None:
        self.slots: Tensor | None = None

    @contextmanager
    def use(self, slots: Sequence[int]) -> Iterator[None]:
        """Let the rows of a batch have these adapters inside the context."""
        self.slots = torch.tensor(slots) if any(slots) else None
        try:
            yield
        finally:
            self.slots = None


class AdapterTable(nn.Module):
    """The products that adapters add to one linear layer; the first r rows are zero, for rows without one.

    Rows are looked up one by one, so that an engine copies them with several threads.
    """

    def __init__(self, a: Sequence[int], b: Sequence[int], rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.a = nn.Parameter(torch.empty(*a))  # ((N + 1) * r, I)
        self.b = nn.Parameter(torch.empty(*b))  # ((N + 1) * r, O)

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """Return what is added (B, T, O) to the results of x (B, T, I), for each row's slot (B,)."""
        rows = slots[:, None] * self.rank + torch.arange(self.rank, device=slots.device)  # (B, r)
        inner = x @ functional.embedding(rows, self.a).transpose(1, 2)  # (B, T, r)
        return inner @ functional.embedding(rows, self.b)


class AdaptedLinear(nn.Linear):
    """A linear layer with a table of adapters beside it.

    They are added around the call, since hooks round what the layer itself reads as its kernel does.
    """

    adapters: AdapterTable
    choice: AdapterChoice

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = super().__call__(x)
        slots = self.choice.slots
        return result if slots is None else result + self.adapters(x, slots)


def read_adapter_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the adapters beside a base model; none of most checkpoints."""
    if not (folder / FILE).is_file():
        return ()
    with safe_open(folder / FILE, "pt") as file:
        return tuple(json.loads(file.metadata()[NAMES]))


def add_tables(model: nn.Module, folder: Path) -> AdapterChoice:
    """Replace the linear layers that a folder's tables are of; return what chooses among their adapters."""
    choice = AdapterChoice()
    count = len(read_adapter_names(folder))
    with safe_open(folder / FILE, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    for name, shape in shapes.items():
        path, is_first, _ = name.partition(".adapters.a")
        if not is_first:
            continue
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        adapted = AdaptedLinear(linear.in_features, linear.out_features, linear.bias is not None)
        adapted.adapters = AdapterTable(shape, shapes[f"{path}.adapters.b"], shape[0] // (count + 1))
        adapted.choice = choice
        parent, _, own = path.rpartition(".")
        setattr(model.get_submodule(parent), own, adapted)
    return choice
