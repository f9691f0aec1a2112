"""Runs the cases of a model of pictures through the runtime's own loop, and compares them with PyTorch's.

T tokens, E text features, L channels of latents, H and W height and width of latents
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...backends.backend import Array
from ...backends.part import Part
from ...bundle.image_defaults import ImageDefaults
from ...bundle.manifest import Artifact
from ...images.denoise import denoise, predict
from ...images.denoising import Scheduler
from ...images.noise import Generator
from ...images.scheduler_config import SchedulerConfig
from ...images.schedulers import make_scheduler
from .case import Case, CaseSet, Encoding, Known, Location
from .judge import Limits, Seen, compare_known
from .outcome import Outcome

# What each graph reads of PyTorch's answers, and the only place of it, where it reads a text once.
READS = {"vae_decoder": "latents", "vae_encoder": "pictures"}


@dataclass(frozen=True)
class PartsEngine(ABC):
    """Base of engines whose graphs run by themselves; `parts` has them by their names."""

    parts: Mapping[str, Part]
    encoding: ClassVar[Encoding | None] = None

    @property
    def artifacts(self) -> Sequence[Artifact]:
        return [part.artifact for part in self.parts.values()]

    @abstractmethod
    def run(self, case_set: CaseSet, case: Case) -> Iterator[Seen]:
        """Yield what a case's graph gave."""

    def compare(self, case_set: CaseSet, cases: Sequence[Case], limits: Limits) -> Outcome:
        return compare_known(self.run, case_set, cases, limits)

    def close(self) -> None:
        for part in self.parts.values():
            part.close()


@dataclass(frozen=True)
class ImageEngine(PartsEngine):
    """Runs the graphs of a model that makes pictures; each reads what PyTorch gave, not another graph."""

    defaults: ImageDefaults

    def run(self, case_set: CaseSet, case: Case) -> Iterator[Seen]:
        part = self.parts[case.graph]
        if case.graph == "text_encoder":
            tokens = np.array([case_set.texts[row.text].tokens for row in case.rows], np.int64)
            return see_all(case_set, case, part.run({"ids": tokens}))
        if case.graph == "unet":
            run = run_own_steps if case.runner == "greedy" else run_steps
            return run(part, self.defaults, case_set, case)
        read = READS[case.graph]
        given = np.concatenate([case_set.answers[read][row.text].values for row in case.rows])
        return see_all(case_set, case, part.run({read: given}))


def see_all(case_set: CaseSet, case: Case, results: Mapping[str, Array]) -> Iterator[Seen]:
    """Yield what a graph gave of each row: hidden states (T, E) of tokens, or the only field of a picture."""
    for number, row in enumerate(case.rows):
        values = {}
        for output, array in results.items():
            known = case_set.answers.get(output, {}).get(row.text)
            if known is not None:
                own = array[number]
                values[output] = Known(known.positions, own[known.positions] if own.ndim == 2 else own[None])
        yield Seen(row.text, values, Location(case, 0, number))


def run_steps(part: Part, defaults: ImageDefaults, case_set: CaseSet, case: Case) -> Iterator[Seen]:
    """Yield the predictions of steps, each for the latents that PyTorch had before it."""
    scheduler = make_case_scheduler(defaults, case_set)
    text = read_states(case_set, [row.text for row in case.rows])
    for step, ends in enumerate(zip(*(row.ends for row in case.rows), strict=True)):
        place = np.array([ends[0] - 1])
        if place[0] not in case_set.answers["sample"][case.rows[0].text].positions:
            continue  # of golden data, which keeps some
        samples = [case_set.answers["sample"][row.text].find_values(place) for row in case.rows]
        sample = np.concatenate(samples)
        timestep = float(scheduler.timesteps[place[0]])
        noise = predict(part, defaults, sample, timestep, text, get_guidance(case_set))
        for number, row in enumerate(case.rows):
            values = {"noise": Known(place, noise[number][None])}
            yield Seen(row.text, values, Location(case, step, number))


def run_own_steps(part: Part, defaults: ImageDefaults, case_set: CaseSet, case: Case) -> Iterator[Seen]:
    """Yield the latents that a graph makes of noise, step by step."""
    for number, row in enumerate(case.rows):
        latents = make_latents(part, defaults, case_set, row.text)
        yield Seen(row.text, {"latents": Known(np.array([0]), latents)}, Location(case, 0, number))


def make_latents(part: Part, defaults: ImageDefaults, case_set: CaseSet, text: int) -> Array:
    """Return the latents (1, L, H, W) that a graph makes of a text's noise, with guidance."""
    noise = case_set.texts[text].noise
    denoising = case_set.denoising
    assert noise is not None and denoising is not None
    channels = part.artifact.input("sample").axes[1]
    assert isinstance(channels, int)
    scheduler = make_case_scheduler(defaults, case_set)
    generator = Generator(noise.seed)
    begun = scheduler.begin(generator.normal((1, channels, noise.height, noise.width)))
    guided = [denoising.negative, text] if defaults.guidance_features is None else [text]
    states = read_states(case_set, guided)

    def ask(sample: Array, timestep: float) -> Array:
        return predict(part, defaults, sample, timestep, states, denoising.guidance_scale)

    *_, latents = denoise(scheduler, begun, ask, generator.normal)
    return latents


def read_states(case_set: CaseSet, texts: Sequence[int]) -> Array:
    """Return PyTorch's hidden states (N, T, E) of texts."""
    return np.stack([case_set.answers["text"][text].values for text in texts])


def make_case_scheduler(defaults: ImageDefaults, case_set: CaseSet) -> Scheduler:
    """Return the checkpoint's own scheduler."""
    assert case_set.denoising is not None
    return make_scheduler(SchedulerConfig.from_json(defaults.scheduler), case_set.denoising.steps)


def get_guidance(case_set: CaseSet) -> float:
    """Return the guidance scale."""
    assert case_set.denoising is not None
    return case_set.denoising.guidance_scale
