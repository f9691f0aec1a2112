"""Checks for values of a config.json that no model can have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .activations import ACTIVATIONS


def check_whole(config: Any, *names: str, least: int = 1) -> None:
    """Raise a ValueError unless each named field is an integer of at least `least`."""
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or value < least:
            raise ValueError(f"{name}={value!r} must be an integer of at least {least}")


def check_multiple(config: Any, name: str, of: str) -> None:
    """Raise a ValueError unless one field is a multiple of another."""
    if getattr(config, name) % getattr(config, of):
        raise ValueError(f"{name}={getattr(config, name)} is not a multiple of {of}={getattr(config, of)}")


def check_activation(config: Any, name: str) -> None:
    """Raise a ValueError unless the field names one of `ACTIVATIONS`."""
    if getattr(config, name) not in list(ACTIVATIONS):  # a list: its members need no hash
        raise ValueError(f"{name}={getattr(config, name)!r} is not one of {sorted(ACTIVATIONS)}")


def check_epsilon(config: Any, name: str) -> None:
    """Raise a ValueError unless the field is a finite number of at least 0."""
    epsilon = getattr(config, name)
    if type(epsilon) not in (int, float) or not 0 <= epsilon < math.inf:
        raise ValueError(f"{name}={epsilon!r} must be a number of at least 0")


def check_number(config: Any, *names: str, above: float = -math.inf) -> None:
    """Raise a ValueError unless each named field is None, or a finite number above a limit."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not (type(value) in (int, float) and above < value < math.inf):
            limit = "" if above == -math.inf else f" above {above:g}"
            raise ValueError(f"{name}={value!r} must be a number{limit}")


def check_bool(config: Any, *names: str) -> None:
    """Raise a ValueError unless each named field is True or False."""
    for name in names:
        if type(getattr(config, name)) is not bool:
            raise ValueError(f"{name}={getattr(config, name)!r} must be true or false")


MAX_LAYERS = 2000  # twice as many as the deepest model that was published has


def check_depth(config_json: Mapping[str, Any]) -> None:
    """Raise a ValueError if a published config has more layers than any model.

    Layers are made one by one, so a number of ten digits would be believed for hours.
    """
    for name, value in config_json.items():
        if "layer" in name and type(value) is int and value > MAX_LAYERS:
            raise ValueError(f"{name}={value} in config.json is more than the supported {MAX_LAYERS} layers")
