"""How much noise a sample has at each timestep of the training, and which timesteps a picture takes.

N timesteps of the training, S steps of a picture.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .noise import Float32
from .scheduler_config import Settings

Float64: TypeAlias = npt.NDArray[np.float64]

MOST_COSINE_BETA = 0.999
LEAST_PICTURE = 1e-15  # the cosine leaves 2e-9 of 1000 timesteps, 2e-13 of 100,000
LEAST_ALPHA = 2.0**-24  # instead of 0, whose sigma would be infinite; as in diffusers
KARRAS_RHO = 7.0  # of the paper, arXiv 2206.00364


def compute_betas(settings: Settings) -> Float32:
    """Return the noise (N,) that each timestep of the training adds, as PyTorch rounds it."""
    N = settings.num_train_timesteps
    if settings.trained_betas is not None:
        betas = np.array(settings.trained_betas, np.float32)
    elif settings.beta_schedule == "linear":
        betas = space_linearly(settings.beta_start, settings.beta_end, N)
    elif settings.beta_schedule == "scaled_linear":
        betas = space_linearly(settings.beta_start**0.5, settings.beta_end**0.5, N) ** 2
    else:
        kept = [math.cos((i / N + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(N + 1)]
        ratios = (after / before for before, after in pairwise(kept))
        betas = np.array([min(1 - ratio, MOST_COSINE_BETA) for ratio in ratios], np.float32)
    return betas


def space_linearly(first: float, last: float, count: int) -> Float32:
    """Return `count` numbers as torch.linspace rounds them: from the nearer end, once."""
    first, last = float(np.float32(first)), float(np.float32(last))
    step = float(np.float32(last - first) / np.float32(max(count - 1, 1)))
    places = np.arange(count)
    rising = first + step * places
    falling = last - step * (count - 1 - places)
    return np.where(places < count // 2, rising, falling).astype(np.float32)


def rescale_betas(alphas: Float32) -> Float32:
    """Return betas whose last timestep is noise alone (arXiv 2305.08891, algorithm 1)."""
    roots = np.sqrt(alphas)
    first, last = roots[0], roots[-1]
    roots = (roots - last) * (first / (first - last))
    alphas = roots**2
    rescaled: Float32 = np.float32(1) - np.append(alphas[:1], alphas[1:] / alphas[:-1])
    return rescaled


def accumulate(betas: Float32) -> Float32:
    # PyTorch multiplies in float64 and rounds each product to float32.
    return np.cumprod(np.float32(1) - betas, dtype=np.float64).astype(np.float32)


def compute_alphas(settings: Settings) -> Float32:
    """Return diffusers' alphas_cumprod (N,): the share of the picture in a sample's variance."""
    alphas = accumulate(compute_betas(settings))
    if alphas[-1] < LEAST_PICTURE:
        raise InputError(
            f"the checkpoint's betas leave {alphas[-1]:g} of a picture after {len(alphas)} timesteps; export"
            " it with the scheduler_config.json that it was trained with"
        )
    return accumulate(rescale_betas(alphas)) if settings.rescale_betas_zero_snr else alphas


def compute_sigmas(settings: Settings) -> Float32:
    """Return sigmas (N,): the noise of a sample in parts of its picture, above 0 and finite."""
    alphas = compute_alphas(settings)
    if settings.rescale_betas_zero_snr:
        alphas[-1] = LEAST_ALPHA
    sigmas: Float32 = np.sqrt((np.float32(1) - alphas) / alphas)
    return sigmas


def space_timesteps(settings: Settings, steps: int, *, beyond: int = 0, end: int | None = None) -> Float64:
    """Return the timesteps (S,) of a picture, highest first; those of "linspace" are not rounded.

    Args:
        settings: whose spacing is taken.
        steps: S.
        beyond: how many steps more the timesteps are spaced for, of which the last are left out.
        end: the timestep before which they begin; None is N.
    """
    N = settings.num_train_timesteps
    end = N if end is None else end
    times: Float64
    if settings.timestep_spacing == "linspace":
        times = np.linspace(0, end - 1, steps + beyond)[::-1]
    elif settings.timestep_spacing == "leading":
        places = np.arange(steps + beyond, dtype=np.float64)[::-1]
        times = places * (end // (steps + beyond)) + settings.steps_offset
    else:
        times = np.round(np.arange(end, 0, -N / steps)) - 1
    # The rounding of arange adds one for some counts, which diffusers takes as the timestep -1.
    times = times[:steps]
    if times[0] >= N:
        raise InputError(
            f"steps={steps} begins at timestep {times[0]:g} with the checkpoint's steps_offset"
            f" {settings.steps_offset}, but the last of the training is {N - 1}; take fewer steps",
            option="steps",
        )
    return times


def check_sigmas(sigmas: Float64, steps: int) -> None:
    """Refuse sigmas (S + 1,) of which one before the last is not below the one before it."""
    if (sigmas[1:-1] >= sigmas[:-2]).any():
        raise InputError(
            f"the noise does not fall from step to step with steps={steps} and the checkpoint's scheduler;"
            " take fewer, or another scheduler",
            option="steps",
        )


def space_karras(settings: Settings, highest: float, lowest: float, steps: int) -> Float64:
    """Return the sigmas (S,) of Karras et al., which are closer to each other where they are low."""
    highest = settings.sigma_max or highest
    lowest = settings.sigma_min or lowest
    top, bottom = highest ** (1 / KARRAS_RHO), lowest ** (1 / KARRAS_RHO)
    sigmas: Float64 = (top + np.linspace(0, 1, steps) * (bottom - top)) ** KARRAS_RHO
    return sigmas


def find_timesteps(sigmas: Float64, trained: Float32) -> Float64:
    """Return the timesteps of sigmas (S,) between those of the training (N,), linear in their logarithm."""
    logs, levels = np.log(np.maximum(sigmas, 1e-10)), np.log(trained)
    low = np.clip(np.searchsorted(levels, logs, side="right") - 1, 0, len(levels) - 2)
    share = np.clip((levels[low] - logs) / (levels[low] - levels[low + 1]), 0, 1)
    times: Float64 = (1 - share) * low + share * (low + 1)
    return times
