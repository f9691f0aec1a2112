"""One recipe file per model family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from . import decoder, encoder, transformer
from .explanations import EXPLAIN, make_explanations
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


def make_all_recipes(
    family: str, config: Any, choices: Choices
) -> tuple[dict[str, Recipe], dict[str, Recipe]]:
    """Return a model's recipes, and those of the graphs that explain it, which the outputs may ask for."""
    outputs = tuple(name for name in choices.outputs if name != EXPLAIN)
    recipes = FAMILIES[family].make_recipes(config, replace(choices, outputs=outputs))
    if outputs == choices.outputs:
        return recipes, {}
    return recipes, make_explanations(family, config, choices)


__all__ = ["FAMILIES", "Choices", "FamilyRecipes", "Recipe", "make_all_recipes"]
