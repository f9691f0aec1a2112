"""The noise of each timestep, bit for bit that of diffusers."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
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
    # PyTorch's root of one number in 150 is the float32 next to the nearest.
    rescaled = {**settings, "rescale_betas_zero_snr": True}
    reference = diffusers.DDIMScheduler(**rescaled).alphas_cumprod.numpy()
    alphas = compute_alphas(Settings(**rescaled))
    assert alphas[-1] == reference[-1] == 0
    np.testing.assert_allclose(alphas, reference, rtol=2.0**-20)
    sigmas = np.flip(diffusers.EulerDiscreteScheduler(**settings).sigmas.numpy()[:-1])
    np.testing.assert_allclose(compute_sigmas(Settings(**settings)), sigmas, rtol=2.0**-23)


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
