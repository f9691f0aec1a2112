"""The model that a bundle's graphs are compared with: ours in PyTorch, transformers', or optimum's graphs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from ..errors import raise_checkpoint_errors

if TYPE_CHECKING:
    from torch import nn

    from ...models.checkpoint import Model
    from ...models.weights import Report
    from .onnx_reference import OnnxGraphs

    ReferenceModel: TypeAlias = nn.Module | OnnxGraphs


def load_our_model(
    folder: Path,
    max_length: int,
    keep_types: bool = False,
    report: Report = lambda done, total: None,
) -> Model:
    """Load a checkpoint into PlanForge's own model, for texts of up to `max_length` tokens.

    `keep_types` leaves its weights in their files, for a model that computes nothing; `report` is told the
    bytes that were read, and those of all.
    """
    from ...models import load_model
    from ...models.checkpoint import limit_context

    with raise_checkpoint_errors():
        model = load_model(folder, keep_types=keep_types, report=report)
    limit_context(model, max_length)
    return model


def rest(model: ReferenceModel, folder: Path) -> None:
    """Exchange the fp32 weights of a model of ours for those of its checkpoint, which stay in their files.

    A checkpoint in half precision takes no memory so. Until `wake` the model computes nothing, but its
    weights can be read.
    """
    from ...models import load_model

    if not is_module(model):
        return
    with raise_checkpoint_errors():
        published = dict(load_model(folder, keep_types=True).named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data = published[name].data


def wake(model: ReferenceModel) -> None:
    """Give a model that rests its fp32 weights again; one that does not rest stays as it is."""
    import torch

    if is_module(model):
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.float32).contiguous()


def is_module(model: ReferenceModel) -> TypeGuard[nn.Module]:
    """Tell whether a model is a PyTorch module, which can be looked into and rounded."""
    from torch import nn

    return isinstance(model, nn.Module)
