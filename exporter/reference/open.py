"""Which class asks a decoder: ours, transformers', or the graphs that optimum wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...models.language_model import LanguageModel
from .decoder import HubReference, Reference
from .onnx_reference import OnnxDecoder, OnnxGraphs

if TYPE_CHECKING:
    from .model import ReferenceModel
    from .rounding import Rounding


def make_reference(model: ReferenceModel, rounding: Rounding | None = None) -> Reference:
    """Return what asks a decoder; of a rounding it rounds keys and values alone."""
    if isinstance(model, LanguageModel):
        return Reference(model, rounding)
    return OnnxDecoder(model) if isinstance(model, OnnxGraphs) else HubReference(model)
