"""Dropout (Srivastava et al., 2014) for training, by hooks: neither a model's file nor its graph has it."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from .attention import DynamicCache, PaddedAttention, SourceAttention
from .recurrent import Recurrent

# By the names of our models' modules: embeddings, and what attention and MLP add to the residual stream.
DROPPED_OUTPUTS = re.compile(
    r"embeddings|embedding_norm|source|target|(.+\.)?embed_tokens|.+\.(output|c_proj|o_proj|down_proj)"
)
# GPT-2 adds words and positions outside a module, so what its first block reads; and what classifiers read.
DROPPED_INPUTS = re.compile(r"(.+\.)?h\.0|heads\.(sequence|token)_classification")
# Of recurrent models what a layer reads, and the output, but for states (Zaremba et al., 2014, 1409.2329).
RECURRENT_INPUTS = re.compile(r"encoder\.\d+|cells\.\d+\.input|output")


def add_dropout(model: nn.Module, rate: float = 0.1, attention: float | None = None) -> list[RemovableHandle]:
    """Drop values where GPT-2, BERT and the Transformer's papers do, while the model is in training mode.

    These are embeddings, the results of attention and MLP, attention's weights, and what a classifier reads;
    of a `Recurrent` what each layer and the output read, but for its states.

    Args:
        model: a reference model; saving it, and `model.eval()`, leave dropout out.
        rate: the share of values that become 0; the others are divided by 1 - rate.
        attention: the share of attention's weights; None means `rate`.

    Returns:
        The hooks; each has `remove()`.

    Raises:
        ValueError: a rate that is not at least 0 and below 1, or a model without those places.
    """
    attention = rate if attention is None else attention
    for name, share in (("rate", rate), ("attention", attention)):
        if not 0 <= share < 1:
            raise ValueError(f"{name}={share!r} must be at least 0 and below 1")

    def drop_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return F.dropout(output, rate, module.training)

    def drop_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (F.dropout(inputs[0], rate, module.training), *inputs[1:])

    def drop_weights(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        for cache in inputs:
            if isinstance(cache, DynamicCache | PaddedAttention | SourceAttention):
                cache.dropout = attention if layer.training else 0.0

    inputs_of = RECURRENT_INPUTS if isinstance(model, Recurrent) else DROPPED_INPUTS
    hooks = []
    for name, module in model.named_modules():
        if DROPPED_OUTPUTS.fullmatch(name):
            hooks.append(module.register_forward_hook(drop_output))
        if inputs_of.fullmatch(name):
            hooks.append(module.register_forward_pre_hook(drop_input))
    if not hooks:
        raise ValueError(f"a {type(model).__name__} has no place for dropout; add it to the model itself")
    layers = {layer for stack in model.modules() if isinstance(stack, nn.ModuleList) for layer in stack}
    return hooks + [layer.register_forward_pre_hook(drop_weights) for layer in layers]
