"""Faults planted in the schedulers: the comparison with diffusers finds each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from planforge.runtime.images import denoising, noise_schedule, schedulers

from ...helpers.denoising import Case, compare

Plant = Callable[[pytest.MonkeyPatch], None]


def change(module: Any, name: str, alter: Callable[[Any], Any]) -> Plant:
    """Return what replaces a function by one whose result is altered."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(module, name)
        patch.setattr(module, name, lambda *args, **options: alter(original(*args, **options)))

    return plant


def replace(module: Any, name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(module, name, value)


def set_factor(name: str, alter: Callable[[Any], Any]) -> Plant:
    """Return what alters one factor of every step."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        make = denoising.make_updates
        patch.setattr(
            schedulers,
            "make_updates",
            lambda made_of, **factors: make(made_of, **{**factors, name: alter(np.asarray(factors[name]))}),
        )

    return plant


def look_up_later(patch: pytest.MonkeyPatch) -> None:
    original = schedulers.look_up
    patch.setattr(
        schedulers,
        "look_up",
        lambda alphas, settings, times: original(alphas, settings, np.minimum(times + 1, len(alphas) - 1)),
    )


def keep_the_buffer(patch: pytest.MonkeyPatch) -> None:
    """Let PLMS keep predictions that lie in the model's own array, which the next step overwrites."""

    class Kept(np.ndarray):
        def copy(self, *args: Any, **options: Any) -> Any:
            return self

    original = denoising.PlmsScheduler.step

    def step(self: Any, index: int, prediction: Any, sample: Any, draw: Any) -> Any:
        return np.asarray(original(self, index, prediction.view(Kept), sample, draw))

    patch.setattr(denoising.PlmsScheduler, "step", step)


def shift_sigmas(result: tuple[Any, Any]) -> tuple[Any, Any]:
    """Take each step's sigma from the step behind it."""
    times, sigmas = result
    return times, np.append(sigmas[1:-1], [sigmas[-2] / 2, sigmas[-1]])


def negate_prediction(result: Any) -> Any:
    (clean, clean_by), (noise, noise_by) = result
    return (clean, -clean_by), (noise, -noise_by)


PLMS = denoising.PLMS_WEIGHTS
V = {"prediction_type": "v_prediction"}
TRAILING = {**V, "timestep_spacing": "trailing"}
FAULTS: dict[str, tuple[Case, Plant]] = {
    **{
        f"the prediction's sign, {name}": (
            Case(name),
            change(schedulers, "convert_prediction", negate_prediction),
        )
        for name in schedulers.SCHEDULERS
    },
    **{
        f"every timestep one later, {name}": (
            Case(name),
            change(schedulers, "space_timesteps", lambda times: times + 1),
        )
        for name in ("ddim", "pndm", "euler", "dpm++2m")
    },
    "alphas of the next timestep, ddim": (Case("ddim"), look_up_later),
    "alphas of the next timestep, pndm": (Case("pndm"), look_up_later),
    "sigma of the next step, euler": (Case("euler"), change(schedulers, "make_euler_sigmas", shift_sigmas)),
    "sigma of the next step, ancestral": (
        Case("euler_ancestral"),
        change(schedulers, "make_euler_sigmas", shift_sigmas),
    ),
    "sigma of the next step, dpm++": (Case("dpm++2m"), change(schedulers, "make_dpm_sigmas", shift_sigmas)),
    "rho of Karras, dpm++": (Case("dpm++2m_karras"), replace(noise_schedule, "KARRAS_RHO", 6.9)),
    "rho of Karras, euler": (
        Case("euler", {"use_karras_sigmas": True}),
        replace(noise_schedule, "KARRAS_RHO", 6.9),
    ),
    "a weight of PLMS": (
        Case("pndm"),
        replace(denoising, "PLMS_WEIGHTS", (*PLMS[:4], (55.1 / 24, -59 / 24, 37 / 24, -9 / 24))),
    ),
    "a weight of PLMS at its third step": (
        Case("pndm"),
        replace(denoising, "PLMS_WEIGHTS", (*PLMS[:2], (1.5, -0.501), *PLMS[3:])),
    ),
    "predictions in the model's array": (Case("pndm"), keep_the_buffer),
    "the order of a step's history": (Case("dpm++2m"), set_factor("kept", lambda kept: -kept)),
    "no history": (Case("dpm++2m"), set_factor("kept", lambda kept: 0 * kept)),
    "noise of the ancestral a thousandth too strong": (
        Case("euler_ancestral"),
        set_factor("noise", lambda noise: noise * 1.001),
    ),
    "noise of LCM a thousandth too strong": (Case("lcm"), set_factor("noise", lambda noise: noise * 1.001)),
    "zero SNR left out": (
        Case("euler", {**TRAILING, "rescale_betas_zero_snr": True}),
        change(noise_schedule, "rescale_betas", lambda betas: betas * np.float32(0.999)),
    ),
    "LCM's boundary": (Case("lcm", {"timestep_scaling": 0.01}), replace(schedulers, "SIGMA_DATA", 0.51)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, plant = FAULTS[fault]
    compare(case)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"behind step \d+|timesteps"):
        compare(case)
