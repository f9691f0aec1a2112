"""The graphs of encoder-decoders: Transformers and recurrent ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import recurrent, transformer
from .recipe import Recipe, TraceOptions
from .transformer import MAX_BATCH, TASK, read_context

if TYPE_CHECKING:
    from ....models import RecurrentConfig, TransformerConfig


def make_recipes(config: TransformerConfig | RecurrentConfig, choices: TraceOptions) -> dict[str, Recipe]:
    family: Any = recurrent if config.is_recurrent else transformer
    recipes: dict[str, Recipe] = family.make_recipes(config, choices)
    return recipes


__all__ = ["MAX_BATCH", "TASK", "make_recipes", "read_context"]
