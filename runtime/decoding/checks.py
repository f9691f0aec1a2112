"""Checks of numbers that callers give."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np

from ..errors import InputError

FLOAT32_MAX = float(np.finfo(np.float32).max)


def is_number(value: Any) -> bool:
    """Return whether a value is a real number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_positive(name: str, value: Any, hint: str, most: float = FLOAT32_MAX) -> None:
    allowed = "a finite number over 0" if most == FLOAT32_MAX else f"over 0 and at most {most:g}"
    if not is_number(value) or not 0 < value <= most:
        raise InputError(f"{name} is {value!r}; it must be {allowed}; {hint}", option=name)


def check_integer(name: str, value: Any, least: int, hint: str) -> None:
    """Refuse what is not an integer from `least`; True and False are none."""
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not integer or value < least:
        raise InputError(f"{name} is {value!r}; it must be an integer from {least}; {hint}", option=name)
