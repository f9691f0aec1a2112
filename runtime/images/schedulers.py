"""The schedulers that there are: diffusers' formulas, as the factors of each step.

A sample x of timestep t is a * clean + s * noise with a^2 = alphas_cumprod[t] and a^2 + s^2 = 1; Euler's
is divided by a, so that it is clean + sigma * noise. S steps, N timesteps of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from ..option_checks import check_choice, check_whole
from .denoising import Factors, PlmsScheduler, Scheduler, make_updates
from .noise import Float32
from .noise_schedule import (
    Float64,
    check_sigmas,
    compute_alphas,
    compute_sigmas,
    find_timesteps,
    space_karras,
    space_timesteps,
)
from .scheduler_config import CHOICES, SchedulerConfig, Settings

SIGMA_DATA = 0.5  # the deviation of pictures, in LCM's boundary condition


def convert_prediction(settings: Settings, a: Float64, s: Float64) -> tuple[Factors, Factors]:
    """Return the factors that make the clean sample, and those that make its noise, of a and s (S,)."""
    none, one = np.zeros_like(a), np.ones_like(a)
    if settings.prediction_type == "v_prediction":
        return (a, -s), (s, a)
    if settings.prediction_type == "sample":
        return (none, one), (1 / s, -a / s)
    if not a.all():
        raise InputError(
            "a model of prediction_type 'epsilon' says nothing about the picture where a sample is noise"
            " alone, as the checkpoint's rescale_betas_zero_snr makes the first; take fewer steps with"
            " timestep_spacing 'leading', or another scheduler",
            option="scheduler",
        )
    return (1 / a, -s / a), (none, one)


def look_up(alphas: Float32, settings: Settings, times: npt.NDArray[np.int64]) -> Float64:
    """Return alphas_cumprod at timesteps; of those below 0 what comes behind the last step."""
    final = 1.0 if settings.set_alpha_to_one else float(alphas[0])
    return np.where(times >= 0, alphas[np.maximum(times, 0)].astype(np.float64), final)


def build_ddim(settings: Settings, steps: int, begin: int) -> Scheduler:
    times = np.round(space_timesteps(settings, steps))[begin:].astype(np.int64)
    alphas = compute_alphas(settings)
    now = look_up(alphas, settings, times)
    before = look_up(alphas, settings, times - settings.num_train_timesteps // steps)
    a, s = np.sqrt(now), np.sqrt(1 - now)
    clean_from, noise_from = convert_prediction(settings, a, s)
    variance = settings.eta**2 * (1 - before) / (1 - now) * (1 - now / before)
    direction = np.sqrt(np.maximum(1 - before - variance, 0))
    return Scheduler(
        times.astype(np.float32),
        1.0,
        (float(a[0]), float(s[0])),
        make_updates(
            clean_from,
            clean=np.sqrt(before),
            sample=direction * noise_from[0],
            prediction=direction * noise_from[1],
            noise=np.sqrt(variance),
        ),
        draws=len(times) if settings.eta else 0,
        limit=settings.clip_sample_range if settings.clip_sample else None,
    )


def build_pndm(settings: Settings, steps: int, begin: int) -> Scheduler:
    once = np.round(space_timesteps(settings, steps)).astype(np.int64)
    times = np.concatenate([once[:1], once[1:2], once[1:]])[begin:]  # the second comes twice
    stride = settings.num_train_timesteps // steps
    again = np.arange(len(times)) == 1
    alphas = compute_alphas(settings)
    now = look_up(alphas, settings, times + again * stride)
    before = look_up(alphas, settings, times - ~again * stride)
    a, s = np.sqrt(now), np.sqrt(1 - now)
    clean_from, noise_from = convert_prediction(settings, a, s)
    # Formula 9 of arXiv 2202.09778.
    noise = (now - before) / (now * np.sqrt(1 - before) + np.sqrt(now * (1 - now) * before))
    return PlmsScheduler(
        times.astype(np.float32),
        1.0,
        (float(a[0]), float(s[0])),
        make_updates(
            clean_from,
            sample=np.sqrt(before / now) + noise * noise_from[0],
            prediction=noise * noise_from[1],
        ),
    )


def make_euler_sigmas(settings: Settings, steps: int) -> tuple[Float32, Float64]:
    """Return the timesteps (S,) and the sigmas (S + 1,) of both of Euler's schedulers."""
    times = space_timesteps(settings, steps)
    trained = compute_sigmas(settings)
    sigmas = np.interp(times.astype(np.float32), np.arange(len(trained)), trained)
    if settings.interpolation_type == "log_linear":
        logs = np.log(trained)
        sigmas = np.exp(np.linspace(logs[-1], logs[0], steps + 1))
    if settings.use_karras_sigmas:
        sigmas = space_karras(settings, float(sigmas[0]), float(sigmas[-1]), steps)
        times = find_timesteps(sigmas, trained)
    last = float(trained[0]) if settings.final_sigmas_type == "sigma_min" else 0.0
    sigmas = np.append(sigmas, last)[: len(times) + 1].astype(np.float32).astype(np.float64)
    check_sigmas(sigmas, steps)
    return times.astype(np.float32), sigmas


def build_euler(settings: Settings, steps: int, begin: int, *, ancestral: bool = False) -> Scheduler:
    times, sigmas = make_euler_sigmas(settings, steps)
    highest = float(sigmas.max())
    now, following = sigmas[begin:-1], sigmas[begin + 1 :]
    root = np.sqrt(now**2 + 1)
    (of_sample, of_prediction), _ = convert_prediction(settings, 1 / root, now / root)
    # With noise anew the step goes further down, and the noise up again.
    down = following**2 / now if ancestral else following
    return Scheduler(
        times[begin:],
        highest if settings.timestep_spacing != "leading" else float(np.sqrt(highest**2 + 1)),
        (1.0, float(now[0])),
        make_updates(
            (of_sample / root, of_prediction),
            clean=1 - down / now,
            sample=down / now,
            noise=np.sqrt(following**2 - down**2),
        ),
        draws=len(now) if ancestral else 0,
        scales=(1 / root).tolist(),
    )


def build_euler_ancestral(settings: Settings, steps: int, begin: int) -> Scheduler:
    return build_euler(settings, steps, begin, ancestral=True)


def make_dpm_sigmas(settings: Settings, steps: int) -> tuple[npt.NDArray[np.int64], Float64]:
    """Return the timesteps (S,) and the sigmas (S + 1,) of DPM++."""
    trained = compute_sigmas(settings)
    clipped = int(np.count_nonzero(-np.log(trained) < settings.lambda_min_clipped))
    end = max(1, len(trained) - clipped)
    times = np.round(space_timesteps(settings, steps, beyond=1, end=end))
    sigmas = np.interp(times, np.arange(len(trained)), trained)
    if settings.use_karras_sigmas:
        sigmas = space_karras(settings, float(trained[-1]), float(trained[0]), steps)
        times = find_timesteps(sigmas, trained)
        if settings.beta_schedule != "squaredcos_cap_v2":
            times = np.round(times)
    last = trained[0] if settings.final_sigmas_type == "sigma_min" else 0.0
    sigmas = np.append(sigmas, last).astype(np.float32).astype(np.float64)
    check_sigmas(sigmas, steps)
    return times.astype(np.int64), sigmas


def build_dpm_2m(settings: Settings, steps: int, begin: int) -> Scheduler:
    times, sigmas = make_dpm_sigmas(settings, steps)
    count = len(times)  # fewer than S where lambda_min_clipped leaves some out
    begin = min(begin, count - 1)
    now, following = sigmas[begin:-1], sigmas[begin + 1 :]
    a, a_following = 1 / np.sqrt(now**2 + 1), 1 / np.sqrt(following**2 + 1)
    clean = a_following * (1 - following / now)
    # Half the difference from the clean sample before, by the steps' lengths in log(sigma).
    ratio = np.zeros_like(now)
    with np.errstate(divide="ignore"):
        lengths = np.log(now / following)
    ratio[1:] = lengths[1:] / lengths[:-1] / 2
    first_order_last = (
        settings.euler_at_final
        or (settings.lower_order_final and count < 15)
        or settings.final_sigmas_type == "zero"
    )
    if first_order_last:
        ratio[-1] = 0
    return Scheduler(
        times[begin:].astype(np.float32),
        1.0,
        (float(a[0]), float(now[0] * a[0])),
        make_updates(
            convert_prediction(settings, a, now * a)[0],
            clean=clean * (1 + ratio),
            sample=following * a_following / (now * a),
            kept=-clean * ratio,
        ),
    )


def build_lcm(settings: Settings, steps: int, begin: int) -> Scheduler:
    taught, N = settings.original_inference_steps, settings.num_train_timesteps
    if taught > N:
        raise InputError(f"the checkpoint's original_inference_steps is {taught}, of {N} timesteps alone")
    most = int(taught * settings.strength)
    if not most:
        raise InputError(
            f"strength={settings.strength} of the {taught} steps that the model was taught leaves none; take"
            " more",
            option="strength",
        )
    check_whole("steps", steps, 1, min(most, N), what="LCM's models are taught so many, times strength")
    every = np.arange(1, most + 1)[::-1] * (N // taught) - 1
    times = every[np.linspace(0, most, steps, endpoint=False).astype(np.int64)][begin:]
    alphas = compute_alphas(settings).astype(np.float64)
    now, following = alphas[times], alphas[np.append(times[1:], times[-1])]
    a, s = np.sqrt(now), np.sqrt(1 - now)
    scaled = times * settings.timestep_scaling
    kept = np.sqrt(following)
    kept[-1] = 1.0  # the last step draws no noise
    return Scheduler(
        times.astype(np.float32),
        1.0,
        (float(a[0]), float(s[0])),
        make_updates(
            convert_prediction(settings, a, s)[0],
            clean=kept * scaled / np.sqrt(scaled**2 + SIGMA_DATA**2),
            sample=kept * SIGMA_DATA**2 / (scaled**2 + SIGMA_DATA**2),
            noise=np.sqrt(1 - following),
        ),
        draws=len(times) - 1,
        limit=settings.clip_sample_range if settings.clip_sample else None,
    )


@dataclass(frozen=True)
class Kind:
    """A scheduler.

    Attributes:
        class_name: of diffusers.
        build: makes it of the settings, S, and the step to begin with.
        defaults: the settings that it reads, with its own values; of `FIXED` those that matter.
        predictions: the prediction_type that it takes.
        forced: settings whatever the checkpoint has.
    """

    class_name: str
    build: Callable[[Settings, int, int], Scheduler]
    defaults: Mapping[str, Any]
    predictions: tuple[str, ...] = CHOICES["prediction_type"]
    forced: Mapping[str, Any] = field(default_factory=dict)


BETAS = {
    "num_train_timesteps": 1000,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "trained_betas": None,
    "prediction_type": "epsilon",
    "steps_offset": 0,
}
CLIPPED = {"clip_sample_range": 1.0, "thresholding": False, "rescale_betas_zero_snr": False}
DDIM = {**BETAS, **CLIPPED, "clip_sample": True, "set_alpha_to_one": True, "timestep_spacing": "leading"}
PNDM = {**BETAS, "set_alpha_to_one": False, "skip_prk_steps": False, "timestep_spacing": "leading"}
EULER_ANCESTRAL = {**BETAS, "rescale_betas_zero_snr": False, "timestep_spacing": "linspace"}
SIGMAS = {
    **EULER_ANCESTRAL,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "sigma_min": None,
    "sigma_max": None,
    "final_sigmas_type": "zero",
}
EULER = {**SIGMAS, "interpolation_type": "linear", "timestep_type": "discrete"}
DPM_2M = {
    **SIGMAS,
    "solver_order": 2,
    "solver_type": "midpoint",
    "algorithm_type": "dpmsolver++",
    "thresholding": False,
    "variance_type": None,
    "use_lu_lambdas": False,
    "use_flow_sigmas": False,
    "lower_order_final": True,
    "euler_at_final": False,
    "lambda_min_clipped": -np.inf,
}
LCM = {
    **BETAS,
    **CLIPPED,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "clip_sample": False,
    "original_inference_steps": 50,
    "timestep_scaling": 10.0,
}
NO_SAMPLE = ("epsilon", "v_prediction")

# By the names that users have for them.
SCHEDULERS: Mapping[str, Kind] = {
    "ddim": Kind("DDIMScheduler", build_ddim, DDIM),
    "pndm": Kind("PNDMScheduler", build_pndm, PNDM, NO_SAMPLE),
    "euler": Kind("EulerDiscreteScheduler", build_euler, EULER),
    "euler_ancestral": Kind(
        "EulerAncestralDiscreteScheduler", build_euler_ancestral, EULER_ANCESTRAL, NO_SAMPLE
    ),
    "dpm++2m": Kind("DPMSolverMultistepScheduler", build_dpm_2m, DPM_2M),
    "dpm++2m_karras": Kind(
        "DPMSolverMultistepScheduler", build_dpm_2m, DPM_2M, forced={"use_karras_sigmas": True}
    ),
    "lcm": Kind("LCMScheduler", build_lcm, LCM),
}


def find_scheduler(config: SchedulerConfig, name: str | None = None) -> str:
    """Return the name of a scheduler: the one that is asked for, else the checkpoint's own."""
    if name is None:
        own = (name for name, kind in SCHEDULERS.items() if kind.class_name == config.class_name)
        name = next(own, None)
        if name is None:
            raise InputError(
                f"the checkpoint's own scheduler is {config.class_name}, which PlanForge does not have;"
                f" name one of {', '.join(SCHEDULERS)}",
                option="scheduler",
            )
    check_choice("scheduler", name, SCHEDULERS)
    return name


def make_scheduler(
    config: SchedulerConfig,
    steps: int,
    name: str | None = None,
    strength: float = 1.0,
    eta: float = 0.0,
    *,
    keeps_steps: bool = False,
) -> Scheduler:
    """Return a scheduler for one batch of pictures.

    Args:
        config: of the checkpoint.
        steps: of a picture without another one, S; PNDM calls the model once more.
        name: one of `SCHEDULERS`; None takes the checkpoint's own.
        strength: how much of another picture is made anew, above 0 up to 1: the first steps are left out.
        eta: of DDIM, from 0 to 1: how much noise is drawn at each step.
        keeps_steps: whether LCM makes all steps with another picture too, closer to each other, as diffusers'
            pipelines of latent consistency models do.
    """
    name = find_scheduler(config, name)
    kind = SCHEDULERS[name]
    settings = config.select(name, kind.defaults, kind.predictions)
    check_whole("steps", steps, 1, settings.num_train_timesteps)
    check_share("strength", strength)
    if keeps_steps and name == "lcm" and strength:
        return kind.build(replace(settings, strength=strength), steps, 0)
    taken = int(steps * strength)
    if not taken:
        raise InputError(
            f"strength={strength} of {steps} steps leaves none; take more of both", option="strength"
        )
    if check_share("eta", eta) and name != "ddim":
        raise InputError(f"eta={eta} is an option of ddim alone, and the scheduler is {name}", option="eta")
    return kind.build(replace(settings, eta=eta, **kind.forced), steps, steps - taken)


def check_share(name: str, value: float) -> float:
    """Return a number from 0 to 1; refuse any other."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(f"{name}={value!r:.60} must be a number from 0 to 1", option=name)
    return float(value)
