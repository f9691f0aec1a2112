"""One recipe file per model family."""

from __future__ import annotations

from typing import Any, Protocol

from . import decoder, encoder, transformer
from .recipe import Choices, Recipe


class FamilyRecipes(Protocol):
    """What the module of each model family provides."""

    TASK: str
    MAX_BATCH: int

    def read_context(self, config: Any) -> int:
        """Return the most tokens that the model takes."""

    def make_recipes(self, config: Any, choices: Choices) -> dict[str, Recipe]:
        """Return the recipe of each graph in each dialect that it can have, by `Recipe.id`."""


FAMILIES: dict[str, FamilyRecipes] = {
    "bert": encoder,
    "gpt2": decoder,
    "llama": decoder,
    "modernbert": encoder,
    "transformer": transformer,
}

__all__ = ["FAMILIES", "Choices", "FamilyRecipes", "Recipe"]
