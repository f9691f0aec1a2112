"""The model that a bundle's graphs are compared with: ours in PyTorch, transformers', or optimum's graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeGuard
from weakref import WeakKeyDictionary

from ..errors import raise_checkpoint_errors
from ..memory import Reclaimer

if TYPE_CHECKING:
    from torch import nn

    from ...models.families import Model
    from ...models.weights import Report
    from .onnx_reference import OnnxGraphs

    ReferenceModel: TypeAlias = nn.Module | OnnxGraphs

# Of each model that was loaded here: its weights, by name, as its checkpoint's files hold them.
_published: WeakKeyDictionary[nn.Module, Mapping[str, nn.Parameter]] = WeakKeyDictionary()


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
        published = model if keep_types else load_model(folder, keep_types=True)
    limit_context(model, max_length)
    _published[model] = dict(published.named_parameters())
    for name, parameter in model.named_parameters():
        if _published[model][name].dtype == parameter.dtype:  # so that the file is not mapped twice
            parameter.data = _published[model][name].data
    return model


def find_published(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """Return the same weights as they lie in the files of a model's checkpoint, by name; none of others'."""
    return _published.get(model, {})


def rest(model: ReferenceModel) -> None:
    """Exchange the fp32 weights of a model of ours for those in the files of its checkpoint.

    One in half precision takes no memory so. Until `wake` the model computes nothing, but its weights can be
    read. Other models stay as they are.
    """
    if is_module(model):
        published = find_published(model)
        for name, parameter in model.named_parameters():
            if name in published:
                parameter.data = published[name].data


def wake(model: ReferenceModel) -> None:
    """Give a model that rests its fp32 weights again; one that does not rest stays as it is."""
    import torch

    if is_module(model):
        reclaimer = Reclaimer()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.float32).contiguous()
            reclaimer.count(parameter.nbytes)


def is_module(model: ReferenceModel) -> TypeGuard[nn.Module]:
    """Tell whether a model is a PyTorch module, which can be looked into and rounded."""
    from torch import nn

    return isinstance(model, nn.Module)
