"""Chooses some of many indices, evenly spread."""

from __future__ import annotations

import numpy as np


def evenly(count: int, most: int) -> tuple[int, ...]:
    """Return at most `most` of `count` indices, the first and last among them."""
    return tuple(int(i) for i in np.unique(np.linspace(0, count - 1, min(count, most)).round()))
