"""Runs PyTorch's model in float64, or with scalars in fp16, while its weights stay as they are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten
READ_LITTLE = (aten.embedding, aten.index, aten.index_select, aten.new_zeros)  # of what they are given
PIECE_NUMBERS = 2**17  # of a weight that are in float64 at once: they fit a core's cache


class ComputeInFloat64(TorchDispatchMode):
    """Computes in float64 with a model whose weights stay in fp32."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.convolutions = WidenConvolutions()

    def __enter__(self) -> Any:
        self.convolutions.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.convolutions.__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as of RoundResults

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        if func.overloadpacket in READ_LITTLE:
            return tree_map(widen, func(*args, **(kwargs or {})))
        if func.overloadpacket in (aten.mm, aten.addmm) and args[-1].dtype == torch.float32:
            *bias, x, weight = args
            parts = weight.split(max(1, PIECE_NUMBERS // len(weight)), dim=1)
            product = torch.cat([x.double() @ part.double() for part in parts], dim=1)
            return product + bias[0].double() if bias else product
        args, kwargs = tree_map(widen, (args, kwargs or {}))
        return tree_map(widen, func(*args, **kwargs))


class WidenConvolutions(TorchFunctionMode):
    """Widens what a convolution reads, whose types PyTorch compares before it dispatches."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            args, kwargs = tree_map(widen, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def widen(argument: Any) -> Any:
    """Return a tensor in fp32, or that type, in float64; anything else as it is."""
    if isinstance(argument, Tensor):
        return argument.double() if argument.dtype == torch.float32 else argument
    return torch.float64 if argument is torch.float32 else argument


class RoundConstants(TorchDispatchMode):
    """Rounds scalars that are added, or multiplied or divided by, to fp16, as graphs have them.

    `has_plain_gelu` tells whether those of GELU are among them, as in other exporters' graphs.
    """

    def __init__(self, has_plain_gelu: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_plain_gelu = has_plain_gelu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as of RoundResults

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (aten.mul, aten.div, aten.add, aten.sub):
            args = tuple(map(round_scalar, args))
        if func.overloadpacket is aten.gelu and self.has_plain_gelu:
            (x,) = args
            if (kwargs or {}).get("approximate") == "tanh":
                inner = round_scalar(math.sqrt(2 / math.pi)) * (x + round_scalar(0.044715) * x**3)
                return x * 0.5 * (1 + torch.tanh(inner))
            return x * 0.5 * (1 + torch.erf(x / round_scalar(math.sqrt(2))))
        return func(*args, **(kwargs or {}))


def round_scalar(argument: Any) -> Any:
    """Return a scalar as fp16 has it; anything else as it is."""
    if isinstance(argument, float):
        return float(np.float16(argument))
    is_number = isinstance(argument, Tensor) and argument.ndim == 0 and argument.is_floating_point()
    return argument.half().to(argument.dtype) if is_number else argument
