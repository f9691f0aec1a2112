"""The model that a bundle's graphs are compared with: ours in PyTorch, transformers', or optimum's graphs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from ..errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

    from ...models.checkpoint import Model
    from .onnx_reference import OnnxGraphs

    ReferenceModel: TypeAlias = nn.Module | OnnxGraphs


def load_our_model(folder: Path) -> Model:
    """Load a checkpoint into PlanForge's own model.

    Raises:
        CheckpointError: the weights cannot be used; says why.
    """
    from ...models import load_model

    try:
        return load_model(folder)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def is_module(model: ReferenceModel) -> TypeGuard[nn.Module]:
    """Tell whether a model is a PyTorch module, which can be looked into and rounded."""
    from torch import nn

    return isinstance(model, nn.Module)
