"""The noise of each timestep, bit for bit that of diffusers."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import numpy.typing as npt
import pytest

from planforge.runtime.images import noise_schedule
from planforge.runtime.images.noise_schedule import compute_alphas, compute_sigmas
from planforge.runtime.images.scheduler_config import Settings

SETTINGS: list[dict[str, Any]] = [
    {"beta_schedule": "linear"},
    {"beta_schedule": "linear", "beta_start": 0.001, "beta_end": 0.03, "num_train_timesteps": 777},
    {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    {"beta_schedule": "squaredcos_cap_v2"},
    {"beta_schedule": "squaredcos_cap_v2", "num_train_timesteps": 333},
    {"trained_betas": tuple(np.geomspace(1e-4, 0.05, 500).tolist()), "num_train_timesteps": 500},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
def test_alphas_are_those_of_diffusers(settings: dict[str, Any]) -> None:
    reference = diffusers.DDIMScheduler(**settings)
    np.testing.assert_array_equal(compute_alphas(Settings(**settings)), reference.alphas_cumprod.numpy())


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
def test_rescaled_alphas_and_sigmas_differ_by_roots_at_most(settings: dict[str, Any]) -> None:
    # PyTorch's root of some numbers is a float32 next to the nearest, of others on other processors.
    rescaled = {**settings, "rescale_betas_zero_snr": True}
    reference = diffusers.DDIMScheduler(**rescaled).alphas_cumprod.numpy()
    alphas = compute_alphas(Settings(**rescaled))
    assert alphas[-1] == reference[-1] == 0
    allowed = bound_rescaling(compute_alphas(Settings(**settings)).astype(np.float64))
    assert (np.abs(alphas[:-1].astype(np.float64) / reference[:-1] - 1) <= allowed).all()
    assert allowed[: len(allowed) // 2].max() < 2.0**-12
    sigmas = np.flip(diffusers.EulerDiscreteScheduler(**settings).sigmas.numpy()[:-1])
    np.testing.assert_allclose(compute_sigmas(Settings(**settings)), sigmas, rtol=2.0**-23)


def bound_rescaling(alphas: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return how far rescaled alphas (N - 1,) may be from each other where roots are a float32 apart.

    The difference of a root and the last one has the errors of both, and a square has twice as many. Each
    ratio of two alphas is rounded as a part of 1, and all up to a timestep are multiplied.
    """
    roots = np.sqrt(alphas)
    gaps = (roots - roots[-1])[:-1]
    differences = 2 * 2.0**-23 * (roots[:-1] + roots[-1]) / gaps
    ratios = np.append(1.0, gaps[1:] / gaps[:-1]) ** 2
    allowed: npt.NDArray[np.float64] = differences + 2.0**-22 + np.cumsum(2.0**-23 / ratios)
    return allowed


def test_products_in_float32_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        noise_schedule, "accumulate", lambda betas: np.cumprod(np.float32(1) - betas, dtype=np.float32)
    )
    with pytest.raises(AssertionError):
        test_alphas_are_those_of_diffusers(SETTINGS[2])


def test_steps_from_one_end_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        noise_schedule,
        "space_linearly",
        lambda first, last, count: np.linspace(first, last, count, dtype=np.float32),
    )
    with pytest.raises(AssertionError):
        test_alphas_are_those_of_diffusers(SETTINGS[2])
