"""Checks for values of a config.json that no model can have."""

from __future__ import annotations

import math
from pathlib import Path
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


DEPTHS = ("n_layer", "num_hidden_layers", "encoder_layers", "decoder_layers")


def check_depth(folder: Path, config: Any, tensors: int) -> None:
    """Raise a ValueError if a config has more layers than the checkpoint has tensors.

    Else a number of ten digits would be believed until all these layers were made.
    """
    for name in DEPTHS:
        layers = getattr(config, name, 0)
        if layers > tensors:
            raise ValueError(f"{folder}: {name} is {layers}, and the weights have {tensors} tensors in all")
