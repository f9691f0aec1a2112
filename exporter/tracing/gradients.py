"""Gradients as graphs of standard operators: traced by make_fx, as torch.export refuses torch.autograd.

B batch, T tokens, E hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

SIZES = (89, 97, 101, 103, 107, 109, 113, 127, 131, 137)  # of dynamic axes while gradients are traced


def differentiate(score: Callable[..., Tensor], inputs: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
    """Return the gradients of a score (B,) by its first `count` inputs, and the score."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs[:count]]
        scores = score(*leaves, *inputs[count:])
        gradients = torch.autograd.grad(scores.sum(), leaves)
    return (*gradients, scores)


class Autograd:
    """The same as `Gradient`, computed by torch.autograd; `score` has a model in PyTorch."""

    def __init__(self, score: nn.Module, count: int) -> None:
        self.score = score
        self.count = count

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return differentiate(self.score, inputs, self.count)


def multiply_out(x: Tensor, exponent: float) -> Tensor:
    """Return small whole powers as products: gradients of squares have the power 1, and Pow is slow."""
    if exponent in (1, 2, 3):
        powers = {1: x, 2: x * x, 3: x * x * x}
        return powers[int(exponent)]
    return NotImplemented  # type: ignore[no-any-return]


class Gradient(nn.Module):
    """The gradients of a score (B,) by the embeddings that come first among its inputs, and the score.

    Args:
        score: has the model as `model`.
        examples: inputs of any values, whose dynamic axes have lengths that no weight has.
        count: how many of them are embeddings.
    """

    def __init__(self, score: nn.Module, examples: Sequence[Tensor], count: int) -> None:
        super().__init__()
        self.model = score.model
        tensors = dict(score.named_parameters()) | dict(score.named_buffers())
        self.names = list(tensors)
        numbers = {id(tensor): number for number, tensor in enumerate(tensors.values())}
        places = {name: numbers[id(tensor)] for name, tensor in list_places(score).items()}

        def compute(values: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
            given = {name: values[number] for name, number in places.items()}
            call = partial(functional_call, score, given, tie_weights=False)
            return differentiate(lambda *args: call(args), inputs, count)

        decompositions = {**core_aten_decompositions(), torch.ops.aten.pow.Tensor_Scalar: multiply_out}
        trace = make_fx(
            compute,
            tracing_mode="symbolic",
            _allow_non_fake_inputs=True,
            decomposition_table=decompositions,
        )
        self.traced = trace([tensor.detach() for tensor in tensors.values()], *examples)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        return self.traced([tensors[name] for name in self.names], *inputs)  # type: ignore[no-any-return]


def list_places(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name: tied ones by each of theirs, those of a shared module once."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }


def choose_sizes(model: nn.Module, axes: Sequence[str]) -> dict[str, int]:
    """Return a length for each dynamic axis, none of which a weight has: equal axes would become one."""
    taken = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    free = (size for size in SIZES if size not in taken)
    return dict(zip(axes, free, strict=False))
