"""Rounds the PyTorch model as if it stored its values in another precision."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from ...models.attention import PLAIN, AttentionKind
from ..memory import Reclaimer
from ..passes.int8_rows import RowProduct
from ..reference_model import find_published
from .piecewise import PiecewiseCache

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rounding:
    """The rounding of a model's values in one precision."""

    dtype: torch.dtype | None = None  # of weights and of every operation's result
    # Parameters quantized to int8 or int4 and dequantized again, by name.
    weights: Mapping[str, Array] = field(default_factory=dict)
    # Scales of keys and values in int8, (H * D,) by the cache's name ("cache.0.key").
    cache_scales: Mapping[str, Array] = field(default_factory=dict)
    # Products of linears whose rows are rounded too, by their weights' names.
    products: Mapping[tuple[str, ...], RowProduct] = field(default_factory=dict)
    # Columns of a block in which what a linear of `weights` reads is rounded to int8; 0 rounds none of it.
    activation_block: int = 0
    exact: bool = False  # whether everything is computed in float64 instead, where fp32 rounds
    keeps_tables: bool = False  # whether a lookup of a weight in `weights` reads it as it is

    @contextmanager
    def apply(self, model: nn.Module) -> Iterator[None]:
        """Round the model's weights and results inside the context; tied weights stay tied."""
        if self.exact:
            with compute_in_float64(model):
                yield
            return
        named = dict(model.named_parameters(remove_duplicate=False))
        kept = [named[name] for name in self.weights] if self.keeps_tables else []
        with untie(model, dict.fromkeys(kept, nn.Embedding)):
            yield from self.exchange(model, named)

    def exchange(self, model: nn.Module, named: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Round the model's weights, which have these names, and its results, until the caller goes on."""
        exchanged = ExchangedWeights(model)
        hooks: list[RemovableHandle] = []
        try:
            exchanged.release([named[name] for name in self.weights])
            for name, array in self.weights.items():
                exchanged.put(named[name], torch.from_numpy(array))
            if self.activation_block:
                hooks += round_activations(model, self.weights, self.activation_block)
            for names, product in self.products.items():
                hooks += round_rows(model, names, product)
                joined = torch.from_numpy(product.dequantize())  # (N, K) of all
                heights = [len(named[name]) for name in names]
                for name, own in zip(names, torch.split(joined, heights), strict=True):
                    exchanged.put(named[name], own)
            if self.dtype is None:
                yield
                return
            for parameter in model.parameters():
                exchanged.put(parameter, round_to(self.dtype, parameter.data))
            with RoundResults(self.dtype):
                yield
        finally:
            exchanged.put_back()
            for hook in hooks:
                hook.remove()


@contextmanager
def compute_in_float64(model: nn.Module) -> Iterator[None]:
    """Keep a model's weights and tables in float64 inside the context."""
    exchanged = ExchangedWeights(model)
    tables = [
        (module, name, table)
        for module in model.modules()
        for name, table in module.named_buffers(recurse=False)
        if table.is_floating_point()
    ]
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)  # of masks, and of whatever else is made meanwhile
        for parameter in model.parameters():
            exchanged.put(parameter, parameter.data.double())
        for module, name, table in tables:
            setattr(module, name, table.double())
        yield
    finally:
        torch.set_default_dtype(usual)
        exchanged.put_back()
        for module, name, table in tables:
            setattr(module, name, table)


@contextmanager
def untie(model: nn.Module, untied: Mapping[nn.Parameter, type[nn.Module]]) -> Iterator[None]:
    """Give the modules of a class a parameter of their own in place of a tied one, inside the context."""
    tied = [
        (module, weight)
        for module in model.modules()
        for weight, kind in untied.items()
        if isinstance(module, kind) and getattr(module, "weight", None) is weight
    ]
    try:
        for module, weight in tied:
            module.weight = nn.Parameter(weight.data, requires_grad=False)
        yield
    finally:
        for module, weight in tied:
            module.weight = weight


class ExchangedWeights:
    """The weights of a model that others replace, until they are put back.

    Those that lie in a checkpoint's files too are not kept in memory meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        published = find_published(model)
        self._published = {
            parameter: published[name].data
            for name, parameter in model.named_parameters()
            if name in published
        }
        self._originals: dict[nn.Parameter, Tensor] = {}
        self._reclaimer = Reclaimer()

    def release(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let parameters be read from their files until others replace them."""
        for parameter in parameters:
            if parameter in self._published:
                parameter.data = self._originals[parameter] = self._published[parameter]

    def put(self, parameter: nn.Parameter, data: Tensor) -> None:
        """Make a parameter hold other data."""
        self._originals.setdefault(parameter, self._published.get(parameter, parameter.data))
        parameter.data = data
        self._reclaimer.count(data.nbytes)

    def put_back(self) -> None:
        """Let every parameter hold its own data again; what comes from files becomes fp32."""
        for parameter, original in self._originals.items():
            parameter.data = original
        for parameter in self._originals:  # when nothing stands in for any of them any more
            if parameter in self._published:
                parameter.data = parameter.data.to(torch.float32).contiguous()
                self._reclaimer.count(parameter.nbytes)


def find_linear(model: nn.Module, weight: str) -> nn.Linear | None:
    """Return the module that multiplies by a weight, by any of its names; None if there is none."""
    parameter = dict(model.named_parameters(remove_duplicate=False)).get(weight)
    return next((m for m in model.modules() if isinstance(m, nn.Linear) and m.weight is parameter), None)


def round_rows(model: nn.Module, names: tuple[str, ...], product: RowProduct) -> list[RemovableHandle]:
    """Make linears see their rows as `product` rounds them, until the hooks are removed."""

    def round_result(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        (x,) = inputs
        flat = product.round_rows(x.reshape(-1, x.shape[-1]).numpy())
        return (torch.from_numpy(flat).view(x.shape),)

    linears = [find_linear(model, name) for name in names]
    return [linear.register_forward_pre_hook(round_result) for linear in linears if linear is not None]


def round_activations(model: nn.Module, weights: Collection[str], size: int) -> list[RemovableHandle]:
    """Make the linears of these weights see int8 in blocks of `size` columns, until the hooks are removed."""

    def round_blocks(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        *rows, width = inputs[0].shape
        blocks = inputs[0].reshape(*rows, width // size, size)
        scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
        return ((blocks / scale).round_().mul_(scale).flatten(-2),)

    linears = {find_linear(model, name) for name in weights}
    return [linear.register_forward_pre_hook(round_blocks) for linear in linears if linear is not None]


class RoundedCache(PiecewiseCache):
    """A cache that rounds keys and values to int8, from -128 to 127, by `Rounding.cache_scales`."""

    def __init__(self, scales: Mapping[str, Array], *args: Any) -> None:
        super().__init__(*args)
        self.scales = scales

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind = PLAIN) -> Tensor:
        k = self.round_heads(f"cache.{layer}.key", k)
        v = self.round_heads(f"cache.{layer}.value", v)
        return super().attend(layer, q, k, v, kind)

    def round_heads(self, name: str, x: Tensor) -> Tensor:
        scale = torch.from_numpy(self.scales[name]).view(x.shape[1], 1, x.shape[3])
        return (x / scale).round().clamp(-128, 127) * scale


class RoundResults(TorchDispatchMode):
    """Rounds the result of every operation to `dtype`; each computes in fp32 inside, as a kernel does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; else PyTorch imports its compiler, which takes 4 s

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shared = {tensor.untyped_storage().data_ptr() for tensor in read}

        def round_result(tensor: Tensor) -> Tensor:
            is_view = tensor.untyped_storage().data_ptr() in shared  # rounded already
            return tensor if is_view or not tensor.is_floating_point() else round_to(self.dtype, tensor)

        with use_one_thread():
            return tree_map_only(Tensor, round_result, out)


class RoundInAnyOrder(TorchDispatchMode):
    """Moves float64's results at random, as far as fp32's rounding may move them in any order of addition.

    Processors add in different orders, so that one of them shows one sample of what rounding does. A rounding
    is even between -2**-24 and 2**-24 of its value. A sum of K terms, one after another, rounds each of its
    K partial sums: more than any order that has several of them side by side.
    """

    DEVIATION = 2.0**-24 / 3**0.5  # of one rounding, relative

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = torch.Generator().manual_seed(seed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as of RoundResults

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shared = {tensor.untyped_storage().data_ptr() for tensor in read}
        steps = self.measure_steps(func, args, kwargs, out)

        def move(tensor: Tensor) -> Tensor:
            is_view = tensor.untyped_storage().data_ptr() in shared  # moved already
            if is_view or not tensor.is_floating_point():
                return tensor
            noise = torch.randn(tensor.shape, generator=self.random, dtype=tensor.dtype)
            return tensor + self.DEVIATION * noise * (tensor.abs() if steps is None else steps)

        return tree_map_only(Tensor, move, out)

    def measure_steps(self, func: Any, args: Any, kwargs: Any, out: Any) -> Tensor | None:
        """Return the root of the sum of squares of a sum's K partial sums; None for anything but a sum.

        The squares are K / 2 times the sum of the terms' squares where signs are random, and K / 3 times the
        square of the result where terms are alike. Both are counted.
        """
        aten = torch.ops.aten
        products = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}
        packet = getattr(func, "overloadpacket", None)
        if packet in products:
            left, right = args[products[packet] :][:2]
            squares = (left * left) @ (right * right)
            of_product: Tensor = (left.shape[-1] * (squares / 2 + out * out / 3)).sqrt()
            return of_product
        if packet in (aten.sum, aten.mean) and out.is_floating_point() and out.numel():
            terms = args[0].numel() // out.numel()
            squares = func(args[0] * args[0], *args[1:], **kwargs)
            squares = squares / terms if packet is aten.mean else squares
            of_sum: Tensor = (terms * (squares / 2 + out * out / 3)).sqrt()
            return of_sum
        return None


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Compute with one thread inside the context.

    Rounding a result takes less time than threads that wait for each other while other work runs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def round_to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return a tensor rounded to `dtype`; values beyond its range stay as they are, as in a graph."""
    near = tensor.to(dtype).float()
    if near.sum().isfinite():  # takes a tenth of the time of looking at every value
        return near
    return torch.where(near.isfinite(), near, tensor)
