"""Rounding PyTorch's numbers to fp16: numpy rounds the same, and numbers beyond fp16's range stay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from planforge.exporter.tasks.rounding import round_to


@pytest.mark.parametrize("beyond", [None, 65520.0, -1e6, np.inf, -np.inf, np.nan])
def test_numbers_are_rounded_and_those_beyond_fp16_stay(beyond: float | None) -> None:
    numbers = np.random.default_rng(0).normal(size=(7, 300)).astype(np.float32) * 1000
    numbers[0, :3] = 65519.0, 1e-8, 0.0  # rounds to fp16's largest, and to 0
    if beyond is not None:
        numbers[3, 5] = beyond
    want = numbers.copy()
    inside = np.abs(numbers) < 65520  # NaN is not
    want[inside] = numbers[inside].astype(np.float16)
    assert (want != numbers)[inside].mean() > 0.9
    given = torch.from_numpy(numbers.copy())
    np.testing.assert_array_equal(round_to(torch.float16, given).numpy(), want)
    np.testing.assert_array_equal(given.numpy(), numbers)  # the tensor itself is left alone


def test_no_numbers_at_all_are_rounded_too() -> None:
    assert round_to(torch.float16, torch.empty(2, 0, 3)).shape == (2, 0, 3)
