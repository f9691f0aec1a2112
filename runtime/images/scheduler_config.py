"""The settings of a checkpoint's scheduler, as diffusers writes them to scheduler_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from ..bundle.json_reader import FILE_NAME, Reader
from ..errors import InputError, ManifestError

MOST_TIMESTEPS = 100_000
LEAST_BETA, MOST_BETA = 1e-6, 0.999  # beyond them float32 has no noise, or no picture
POSITIVE, LARGE = 1e-6, 1e6

CHOICES: Mapping[str, tuple[str, ...]] = {
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "prediction_type": ("epsilon", "v_prediction", "sample"),
    "timestep_spacing": ("leading", "trailing", "linspace"),
    "interpolation_type": ("linear", "log_linear"),
    "final_sigmas_type": ("zero", "sigma_min"),
}
FLAGS = (
    "rescale_betas_zero_snr",
    "set_alpha_to_one",
    "clip_sample",
    "use_karras_sigmas",
    "lower_order_final",
    "euler_at_final",
)
INTEGERS: Mapping[str, tuple[int, int]] = {
    "num_train_timesteps": (2, MOST_TIMESTEPS),
    "steps_offset": (0, MOST_TIMESTEPS),
    "original_inference_steps": (1, MOST_TIMESTEPS),
}
NUMBERS: Mapping[str, tuple[float, float]] = {
    "beta_start": (LEAST_BETA, MOST_BETA),
    "beta_end": (LEAST_BETA, MOST_BETA),
    "clip_sample_range": (POSITIVE, LARGE),
    "sigma_min": (POSITIVE, LARGE),
    "sigma_max": (POSITIVE, LARGE),
    "lambda_min_clipped": (-inf, LARGE),
    "timestep_scaling": (POSITIVE, LARGE),
}
# Settings of which only some values are there, for schedulers that read them.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "thresholding": (False,),
    "skip_prk_steps": (True,),
    "algorithm_type": ("dpmsolver++",),
    "solver_order": (2,),
    "solver_type": ("midpoint", "logrho", "bh1", "bh2"),  # diffusers takes the last three for the first
    "timestep_type": ("discrete",),
    "variance_type": (None,),
    "use_exponential_sigmas": (False,),
    "use_beta_sigmas": (False,),
    "use_lu_lambdas": (False,),
    "use_flow_sigmas": (False,),
}


@dataclass(frozen=True)
class Settings:
    """What one scheduler reads; fields that it does not read have the value that changes nothing."""

    num_train_timesteps: int = 1000
    beta_schedule: str = "linear"
    beta_start: float = 0.0001
    beta_end: float = 0.02
    trained_betas: tuple[float, ...] | None = None
    rescale_betas_zero_snr: bool = False
    prediction_type: str = "epsilon"
    timestep_spacing: str = "leading"
    steps_offset: int = 0
    set_alpha_to_one: bool = True
    clip_sample: bool = False
    clip_sample_range: float = 1.0
    # Not from a file: of DDIM, and of a latent consistency model with another picture.
    eta: float = 0.0
    strength: float = 1.0
    interpolation_type: str = "linear"
    use_karras_sigmas: bool = False
    sigma_min: float | None = None
    sigma_max: float | None = None
    final_sigmas_type: str = "zero"
    lower_order_final: bool = True
    euler_at_final: bool = False
    lambda_min_clipped: float = -inf
    original_inference_steps: int = 50
    timestep_scaling: float = 10.0


@dataclass(frozen=True)
class SchedulerConfig:
    """A checkpoint's scheduler_config.json.

    Attributes:
        class_name: the class of diffusers that the checkpoint names.
        given: the settings that it names, each of a value that some scheduler takes.
    """

    class_name: str
    given: Mapping[str, Any]

    @staticmethod
    def from_json(value: Any, file: str = FILE_NAME) -> SchedulerConfig:
        """Return what a file has; keys that no scheduler reads are left out, as diffusers does."""
        r = Reader(value, "scheduler", file)
        known = [*CHOICES, *FLAGS, *INTEGERS, *NUMBERS, "trained_betas"]
        # Settings that may be null have that as their default, or false.
        given = {key: read_setting(r, key) for key in known if r.value.get(key) is not None}
        given.update({key: r.value[key] for key in FIXED if r.value.get(key) is not None})
        return SchedulerConfig(r.get("_class_name", str), given)

    def select(self, scheduler: str, defaults: Mapping[str, Any], predictions: tuple[str, ...]) -> Settings:
        """Return the settings of a scheduler that reads those of `defaults`: the checkpoint's, else its own.

        So does `from_config` of a class of diffusers.
        """
        chosen = {key: self.given.get(key, default) for key, default in defaults.items()}
        for key, allowed in {**FIXED, "prediction_type": predictions}.items():
            if key in chosen and chosen[key] not in allowed:
                raise InputError(
                    f"the checkpoint's scheduler has {key} {chosen[key]!r:.60}, but PlanForge's {scheduler}"
                    f" has {' or '.join(map(repr, allowed))} only; name another scheduler",
                    option="scheduler",
                )
        settings = Settings(**{key: chosen[key] for key in chosen if key not in FIXED})
        betas = settings.trained_betas
        if betas is not None and len(betas) != settings.num_train_timesteps:
            raise InputError(
                f"the checkpoint's scheduler has {len(betas)} trained_betas for num_train_timesteps"
                f" {settings.num_train_timesteps}; it must have one for each"
            )
        return settings


def read_setting(r: Reader, key: str) -> Any:
    """Return the value of a setting; refuse one that no scheduler takes."""
    if key in FLAGS:
        return r.flag(key)
    if key in CHOICES:
        word = r.get(key, str)
        if word not in CHOICES[key]:
            raise ManifestError(f"{r.file}: {r.what}.{key} is {word!r:.60}, not {' or '.join(CHOICES[key])}")
        return word
    if key == "trained_betas":
        betas = r.list_of(key, float)
        for beta in betas:
            check_range(r, key, beta, LEAST_BETA, MOST_BETA)
        return betas
    if key in INTEGERS:
        integer = r.get(key, int)
        check_range(r, key, integer, *INTEGERS[key])
        return integer
    number = r.number(key, 0.0)
    check_range(r, key, number, *NUMBERS[key])
    return number


def check_range(r: Reader, key: str, number: float, least: float, most: float) -> None:
    if not least <= number <= most:
        raise ManifestError(f"{r.file}: {r.what}.{key} is {number:g}; it must be from {least:g} to {most:g}")
