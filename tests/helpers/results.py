"""Compares what models give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

TIGHT = 1e-5


def assert_equal(got: Any, want: Any) -> None:
    """Compare results field by field, numbers to within rounding."""
    assert type(got) is type(want)
    if is_dataclass(want):
        for field in fields(want):
            assert_equal(getattr(got, field.name), getattr(want, field.name))
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_equal(one, other)
    elif isinstance(want, Mapping):
        assert_equal(list(got.items()), list(want.items()))
    elif isinstance(want, float | np.ndarray):
        np.testing.assert_allclose(got, want, atol=TIGHT, rtol=TIGHT)
    else:
        assert got == want
