"""PlanForge's schedulers and those of diffusers, run side by side over a made-up model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import numpy.typing as npt
import torch
from diffusers.schedulers import scheduling_ddim, scheduling_euler_ancestral_discrete, scheduling_lcm

from planforge.runtime.images.denoising import Draw, Scheduler
from planforge.runtime.images.scheduler_config import SchedulerConfig
from planforge.runtime.images.schedulers import SCHEDULERS, make_scheduler

Floats = npt.NDArray[np.floating[Any]]

SHAPE = (2, 4, 4, 4)
SEED = 7
diffusers.utils.logging.set_verbosity_error()  # it names settings that a scheduler does not read

MOST = 1e-3  # of the deviation of the latents: what may differ at a step in any case
ROUNDINGS = 4  # how many times the rounding of diffusers itself
FOLDER = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}


@dataclass(frozen=True)
class Case:
    """A run of a scheduler.

    Attributes:
        name: of the scheduler.
        settings: what scheduler_config.json has beside the usual of Stable Diffusion.
        own: the class that scheduler_config.json names; None is the scheduler's.
        strength: None begins with noise alone, a number with a picture.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 20
    strength: float | None = None
    eta: float = 0.0
    own: str | None = None

    def __str__(self) -> str:
        parts = [f"{key}={value}" for key, value in self.settings.items()]
        parts += [f"strength={self.strength}"] * (self.strength is not None)
        parts += [f"eta={self.eta}"] * bool(self.eta)
        return " ".join([self.name, f"{self.steps} steps", *parts])

    @property
    def json(self) -> dict[str, Any]:
        """scheduler_config.json."""
        own = self.own or SCHEDULERS[self.name].class_name
        usual = {"beta_schedule": "scaled_linear", "skip_prk_steps": True, "clip_sample": False}
        return {"_class_name": own, **FOLDER, **usual, **self.settings}


@dataclass
class Run:
    """The timesteps that the model got, and the samples: the first, then that behind each step."""

    timesteps: Floats
    samples: list[Floats]


def predict(sample: Floats, timestep: float) -> Floats:
    """A smooth function of sample and time, in the sample's precision."""
    wave = sample.dtype.type(math.sin(0.01 * timestep))
    answer: Floats = np.tanh(0.7 * sample + wave) * 0.9 + 0.1 * sample
    assert answer.dtype == sample.dtype
    return answer


def make_input(shape: tuple[int, ...] = SHAPE) -> tuple[Floats, Floats]:
    """A picture's latents, and noise."""
    draw = np.random.RandomState(0)
    return (0.8 * draw.randn(*shape)).astype(np.float32), draw.randn(*shape).astype(np.float32)


def torch_draw(seed: int = SEED) -> Draw:
    generator = torch.Generator().manual_seed(seed)
    return lambda shape: torch.randn(tuple(shape), generator=generator).numpy()


def run_ours(case: Case, draw: Draw | None = None) -> Run:
    """Denoise with PlanForge's scheduler; the model's answer lies in an array that it overwrites."""
    config = SchedulerConfig.from_json(case.json)
    strength = 1.0 if case.strength is None else case.strength
    scheduler = make_scheduler(config, case.steps, case.name, strength, case.eta)
    return denoise(scheduler, case.strength is not None, draw or torch_draw())


def denoise(scheduler: Scheduler, from_picture: bool, draw: Draw) -> Run:
    picture, noise = make_input()
    start = scheduler.add_noise(picture, noise) if from_picture else noise * scheduler.initial_sigma
    samples = [start.astype(np.float32)]
    answer = np.empty(SHAPE, np.float32)
    for index, timestep in enumerate(scheduler.timesteps):
        answer[:] = predict(scheduler.scale(samples[-1], index), float(timestep))
        samples.append(scheduler.step(index, answer, samples[-1], draw))
        assert samples[-1].dtype == np.float32
    return Run(scheduler.timesteps, samples)


def run_reference(case: Case, dtype: torch.dtype = torch.float32) -> Run:
    """Denoise with diffusers' scheduler, as its pipelines do.

    In float64 its levels of noise are the same float32 numbers, and so is the noise that it draws.
    """
    scheduler, timesteps = start_reference(case)
    for name in ("alphas_cumprod", "final_alpha_cumprod", "sigmas"):
        if isinstance(getattr(scheduler, name, None), torch.Tensor):
            setattr(scheduler, name, getattr(scheduler, name).to(dtype))
    picture, noise = (torch.from_numpy(array).to(dtype) for array in make_input())
    if case.strength is None:
        sample = noise * scheduler.init_noise_sigma
    else:
        sample = scheduler.add_noise(picture, noise, timesteps[:1].repeat(len(picture)))
    further: dict[str, Any] = {"eta": case.eta} if case.name == "ddim" else {}
    if case.name in ("ddim", "euler_ancestral", "lcm"):
        further["generator"] = torch.Generator().manual_seed(SEED)
    samples = [sample.numpy()]
    with draw_in_float32():
        for timestep in timesteps:
            answer = predict(scheduler.scale_model_input(sample, timestep).numpy(), float(timestep))
            sample = scheduler.step(torch.from_numpy(answer), timestep, sample, **further).prev_sample
            samples.append(sample.numpy())
    return Run(timesteps.numpy(), samples)


def start_reference(case: Case) -> tuple[Any, torch.Tensor]:
    """Return diffusers' scheduler, and the timesteps that are left of a picture."""
    kind = SCHEDULERS[case.name]
    with warnings.catch_warnings():  # diffusers hands tensors to np.array
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        scheduler = getattr(diffusers, kind.class_name).from_config(case.json, **kind.forced)
        scheduler.set_timesteps(case.steps)
    if case.strength is None:
        return scheduler, scheduler.timesteps
    pipeline: Any = SimpleNamespace(scheduler=scheduler)
    cut = diffusers.StableDiffusionImg2ImgPipeline.get_timesteps
    timesteps: torch.Tensor = cut(pipeline, case.steps, case.strength, None)[0]
    return scheduler, timesteps


@contextmanager
def draw_in_float32() -> Iterator[None]:
    """Let diffusers draw the same noise for a model of float64, which gives other numbers otherwise."""

    def draw(shape: Any, generator: Any, device: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    with ExitStack() as stack:
        for module in (scheduling_ddim, scheduling_euler_ancestral_discrete, scheduling_lcm):
            stack.enter_context(mock.patch.object(module, "randn_tensor", draw))
        yield


def compare(case: Case, ours: Callable[[Case], Run] = run_ours) -> float:
    """Hold every step to diffusers; return the largest difference in parts of what is allowed.

    What is allowed is a multiple of how far diffusers is from itself in float64 up to that step, and of
    the last bit of the largest number; never more than `MOST`.
    """
    got, want, exact = ours(case), run_reference(case), run_reference(case, torch.float64)
    assert len(got.samples) == len(want.samples)
    # Fractions of Karras' sigmas follow PyTorch's roots, of which one in 150 is not the nearest float32.
    last_bits = {"rtol": 2.0**-22, "atol": 1e-6} if case.settings.get("use_karras_sigmas") else {"rtol": 0}
    np.testing.assert_allclose(got.timesteps, want.timesteps, **last_bits, err_msg="timesteps")
    rounding = 0.0
    worst = 0.0
    for step, (mine, theirs, true) in enumerate(zip(got.samples, want.samples, exact.samples, strict=True)):
        rounding = max(rounding, float(np.abs(theirs - true).max()))
        allowed = ROUNDINGS * (rounding + float(np.spacing(np.abs(theirs).max())))
        allowed = min(allowed, MOST * float(theirs.std()))
        difference = float(np.abs(mine - theirs).max())
        assert difference <= allowed, f"behind step {step}: {difference:.1e} of {allowed:.1e} allowed"
        worst = max(worst, difference / allowed)
    return worst
