"""The recipes of graphs, with one file for each task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from . import decoder, encoder, image_text, images, retrieval, translation, word_vectors
from .explanations import EXPLAIN, make_explanations
from .recipe import Recipe, TraceOptions


class TaskRecipes(Protocol):
    """The interface of each task's module."""

    TASK: str
    MAX_BATCH: int

    def read_context(self, config: Any) -> int:
        """Return the most tokens that the model takes."""

    def make_recipes(self, config: Any, choices: TraceOptions) -> dict[str, Recipe]:
        """Return the recipe of each graph in each dialect that it can have, by `Recipe.id`."""


RECIPES: dict[str, TaskRecipes] = {
    recipes.TASK: recipes
    for recipes in (decoder, encoder, translation, images, image_text, word_vectors, retrieval)
}


def make_all_recipes(
    task: str, config: Any, choices: TraceOptions
) -> tuple[dict[str, Recipe], dict[str, Recipe]]:
    """Return a model's recipes, and those of the graphs that explain it if the outputs ask for them."""
    outputs = tuple(name for name in choices.outputs if name != EXPLAIN)
    recipes = RECIPES[task].make_recipes(config, replace(choices, outputs=outputs))
    if outputs == choices.outputs:
        return recipes, {}
    return recipes, make_explanations(task, config, choices)


__all__ = ["RECIPES", "Recipe", "TaskRecipes", "TraceOptions", "make_all_recipes"]
