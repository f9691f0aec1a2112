"""The PyTorch model as if it stored numbers in another precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class RoundResults(TorchDispatchMode):
    """Rounds the result of every operation to `dtype`; each computes in fp32 inside, as a kernel does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shared = {tensor.untyped_storage().data_ptr() for tensor in read}

        def rounded(tensor: Tensor) -> Tensor:
            is_view = tensor.untyped_storage().data_ptr() in shared  # rounded already
            return tensor if is_view or not tensor.is_floating_point() else tensor.to(self.dtype).float()

        return tree_map_only(Tensor, rounded, out)


@contextmanager
def rounded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Rounds weights and every result to `dtype` for a while; tied weights stay tied."""
    originals = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        for parameter, original in originals:
            parameter.data = original.to(dtype).float()
        with RoundResults(dtype):
            yield
    finally:
        for parameter, original in originals:
            parameter.data = original
