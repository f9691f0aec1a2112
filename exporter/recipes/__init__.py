"""One recipe per model family."""

from __future__ import annotations

from typing import Any

from . import gpt2
from .recipe import Limits, Recipe

FAMILIES = {"gpt2": gpt2.recipes}


def recipes_for(family: str, config: Any, limits: Limits) -> dict[str, Recipe]:
    """The recipe of each dialect that `family` can be exported in."""
    return FAMILIES[family](config, limits)


__all__ = ["Limits", "Recipe", "recipes_for"]
