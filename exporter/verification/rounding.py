"""The PyTorch model as if it stored numbers in another precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def rounded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Rounds weights and every module's result to `dtype` for a while; tied weights stay tied."""
    originals = [(parameter, parameter.data) for parameter in model.parameters()]
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, out: out.to(dtype).float())
        for module in model.modules()
        if module is not model
    ]
    try:
        for parameter, original in originals:
            parameter.data = original.to(dtype).float()
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, original in originals:
            parameter.data = original
