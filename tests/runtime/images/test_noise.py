"""Noise against torch.randn of a seeded generator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from planforge.runtime.errors import InputError
from planforge.runtime.images import noise
from planforge.runtime.images.noise import Generator

SEEDS = (0, 42, 2**32 - 1, 2**32 + 42, 2**40 + 5, 2**64 - 1)
# Single numbers and blocks, tails that a block is drawn anew for, and pairs of which one is left.
SHAPES: tuple[tuple[int, ...], ...] = (
    (2, 4, 8, 8), (3,), (16,), (2, 2), (15,), (17,), (1,), (0,), (5, 7, 3), (), (1, 4, 9, 9), (2,), (31,),
)  # fmt: skip
# A number is radius * cos(angle), with the radius at most sqrt(-2 log 2^-24). Of the same bits the angle is
# equal, and in parts of 2^-24 numpy's logarithm (4 units in the last place, halved by the root), root and
# cosine (2) are off by 4 + 1 + 4, PyTorch's by about half of that, and their products by 1 each.
LARGEST = math.sqrt(48 * math.log(2))
BOUND = 16 * 2.0**-24 * LARGEST


def compare(seed: int) -> None:
    theirs = torch.Generator().manual_seed(seed)
    ours = Generator(seed)
    for shape in SHAPES:
        want = torch.randn(shape, generator=theirs).numpy()
        got = ours.normal(shape)
        assert got.shape == shape
        assert got.dtype == np.float32
        if math.prod(shape) < 16:  # made in float64, rounded once
            np.testing.assert_allclose(got, want, rtol=2.0**-23, err_msg=str(shape))
        else:
            np.testing.assert_allclose(got, want, rtol=0, atol=BOUND, err_msg=str(shape))


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_that_of_torch(seed: int) -> None:
    compare(seed)


def test_torch_reads_32_bits_of_a_seed() -> None:
    first, second = (
        torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in (5, 2**40 + 5)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("shape", [(1, 4, 64, 64), (2, 4, 65, 67), (16384 + 5,)])
def test_a_picture_of_latents_is_nearly_bit_equal(shape: tuple[int, ...]) -> None:
    want = torch.randn(shape, generator=torch.Generator().manual_seed(3)).numpy()
    got = Generator(3).normal(shape)
    assert np.abs(got - want).max() <= BOUND
    assert (got == want).mean() > 0.5


def test_float64_draws_other_noise() -> None:
    """Diffusers draws in the precision of the model's answer; PlanForge's is float32 always."""
    want = torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    assert np.abs(Generator(0).normal((64,)) - want).max() > 0.1


def keep_no_second(patch: pytest.MonkeyPatch) -> None:
    original = Generator.draw_single

    def draw(self: Any) -> float:
        self.kept = None
        return original(self)

    patch.setattr(Generator, "draw_single", draw)


def swap_halves(patch: pytest.MonkeyPatch) -> None:
    original = noise.make_fraction
    patch.setattr(noise, "make_fraction", lambda high, low: original(low, high))


def halve_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(noise, "BLOCK", 8)


@pytest.mark.parametrize("plant", [keep_no_second, swap_halves, halve_blocks])
def test_a_planted_fault_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        compare(42)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, None])
def test_seeds_that_torch_has_not_are_refused(seed: Any) -> None:
    with pytest.raises(InputError, match=r"seed=.* must be an integer from 0 to 18446744073709551615"):
        Generator(seed)
