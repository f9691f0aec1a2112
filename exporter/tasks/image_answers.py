"""Computes PyTorch's answers to the cases of a model of pictures.

T tokens, E text features, L channels of latents, H and W height and width of latents
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.apps.check.case import Case, CaseSet, Known, Row, Text
from ...runtime.apps.check.images import ImageEngine, make_case_scheduler
from ...runtime.backends.backend import Array
from ...runtime.backends.part import Part
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.image_defaults import ImageDefaults
from ...runtime.bundle.manifest import Artifact
from ...runtime.images.denoise import denoise, embed_guidance
from ...runtime.images.noise import Generator
from .base import OpenProgram, list_wanted

if TYPE_CHECKING:
    from torch import Tensor

    from ..reference_model import ReferenceModel
    from .rounding import Rounding

CALIBRATION_STEPS = 4  # of each text to calibrate with, evenly chosen


@dataclass(frozen=True)
class Reference:
    """A model of pictures in PyTorch."""

    model: Any
    defaults: ImageDefaults

    def encode(self, text: Text) -> Array:
        """Return the hidden states (T, E) of a prompt."""
        import torch

        with torch.no_grad():
            states: Array = to_array(self.model.text_encoder(torch.tensor([text.tokens])))[0]
        return states

    def predict(self, sample: Array, timestep: float, text: Array, scale: float) -> Array:
        """Return the UNet's prediction (1, L, H, W) for latents (1, L, H, W) and a text (T, E)."""
        import torch

        features = self.defaults.guidance_features
        guidance = None if features is None else to_tensor(embed_guidance(scale, features, 1))
        with torch.no_grad():
            given = to_tensor(sample), torch.tensor([timestep]), to_tensor(text[None])
            return to_array(self.model.unet(*given, guidance))

    def decode(self, latents: Array) -> Array:
        """Return the pictures (N, 3, 8 H, 8 W) of latents (N, L, H, W)."""
        import torch

        vae = self.model.vae
        with torch.no_grad():
            return to_array(vae.decode(to_tensor(latents) / vae.config.scaling_factor))

    def encode_pictures(self, pictures: Array) -> tuple[Array, Array]:
        """Return mean and deviation (N, L, H, W) of pictures."""
        import torch

        with torch.no_grad():
            mean, deviation = self.model.vae.encode(to_tensor(pictures))
        return to_array(mean), to_array(deviation)

    def make_picture(self, case_set: CaseSet, text: Text, states: Array, negative: Array) -> DenoisedPath:
        """Return what a prompt's noise becomes, step by step."""
        noise = text.noise
        denoising = case_set.denoising
        assert noise is not None and denoising is not None
        scheduler = make_case_scheduler(self.defaults, case_set)
        generator = Generator(noise.seed)
        shape = (1, self.model.config.unet.in_channels, noise.height, noise.width)
        begun = scheduler.begin(generator.normal(shape))
        scale = denoising.guidance_scale
        samples: list[Array] = []
        predictions: list[Array] = []

        def ask(sample: Array, timestep: float) -> Array:
            towards = self.predict(sample, timestep, states, scale)
            samples.append(sample)
            predictions.append(towards)
            if self.defaults.guidance_features is not None:
                return towards
            away = self.predict(sample, timestep, negative, scale)
            guided: Array = away + np.float32(scale) * (towards - away)
            return guided

        *_, latents = denoise(scheduler, begun, ask, generator.normal)
        return DenoisedPath(np.concatenate(samples), np.concatenate(predictions), latents)


@dataclass(frozen=True)
class DenoisedPath:
    """The way from noise to latents.

    Attributes:
        samples: (S, L, H, W) what the UNet read at each step.
        predictions: (S, L, H, W) what it gave for the prompt.
        latents: (1, L, H, W) the end.
    """

    samples: Array
    predictions: Array
    latents: Array


def to_tensor(array: Array) -> Tensor:
    """Return a tensor of the type that PyTorch computes in now."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to(torch.get_default_dtype())


def to_array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().float().numpy()
    return array


def open_reference(model: ReferenceModel, bundle: Bundle, rounding: Rounding | None = None) -> Reference:
    """Return the reference that answers for a model of pictures, in its current precision."""
    assert bundle.manifest.images is not None
    return Reference(model, bundle.manifest.images)


def open_engine(bundle: Bundle, artifact: Artifact, open_program: OpenProgram) -> ImageEngine:
    """Open one graph, which reads PyTorch's answers instead of other graphs'."""
    assert bundle.manifest.images is not None
    return ImageEngine({artifact.graph: Part(open_program(artifact), artifact)}, bundle.manifest.images)


def calibrate(reference: Reference, case_set: CaseSet) -> None:
    """Run PyTorch over the texts to calibrate with, and a few steps of their pictures."""
    assert case_set.denoising is not None
    few = replace(case_set, denoising=case_set.denoising._replace(steps=CALIBRATION_STEPS))
    negative = reference.encode(case_set.texts[case_set.denoising.negative])
    for text in case_set.calibration:
        path = reference.make_picture(few, text, reference.encode(text), negative)
        reference.encode_pictures(reference.decode(path.latents))


def answer_texts(
    reference: Reference, case_set: CaseSet, numbers: Sequence[int]
) -> Iterator[tuple[int, dict[str, Known]]]:
    """Yield PyTorch's answers to texts, by their numbers and outputs.

    Where the answers are known already the model is rounded: each part reads what the others gave unrounded,
    as graphs do, but the way from noise is the rounded model's own.
    """
    assert case_set.denoising is not None
    negative = find_states(reference, case_set, case_set.denoising.negative)
    for number in numbers:
        text = case_set.texts[number]
        wanted = list_wanted(case_set, number)
        own = reference.encode(text)
        values = {"text": own[wanted["text"].positions]}
        if text.noise is not None:
            states = wanted["text"].values if is_known(wanted["text"]) else own
            values |= answer_picture(reference, case_set, number, states, negative)
        yield number, {output: Known(known.positions, values[output]) for output, known in wanted.items()}


def answer_picture(
    reference: Reference, case_set: CaseSet, number: int, states: Array, negative: Array
) -> dict[str, Array]:
    """Return the values of a text's picture at the wanted places, by output."""
    wanted = list_wanted(case_set, number)
    path = reference.make_picture(case_set, case_set.texts[number], states, negative)
    steps = wanted["sample"].positions
    noise = path.predictions[steps]
    latents = path.latents
    if is_known(wanted["sample"]):
        noise = predict_again(reference, case_set, states, wanted["sample"])
        latents = wanted["latents"].values
    pictures = reference.decode(latents)
    known = wanted["pictures"]
    mean, deviation = reference.encode_pictures(known.values if is_known(known) else pictures)
    return {
        "sample": path.samples[steps],
        "noise": noise,
        "latents": path.latents,
        "pictures": pictures,
        "mean": mean,
        "deviation": deviation,
    }


def find_states(reference: Reference, case_set: CaseSet, number: int) -> Array:
    """Return the hidden states of a text that were found before, or find them."""
    known = case_set.answers.get("text", {}).get(number)
    if known is not None and is_known(known):
        return known.values
    return reference.encode(case_set.texts[number])


def is_known(known: Known) -> bool:
    """Tell whether values were found already."""
    return bool(known.values.size)


def predict_again(reference: Reference, case_set: CaseSet, states: Array, samples: Known) -> Array:
    """Return the predictions (S, L, H, W) for samples of steps that are known."""
    scheduler = make_case_scheduler(reference.defaults, case_set)
    assert case_set.denoising is not None
    scale = case_set.denoising.guidance_scale
    return np.concatenate(
        [
            reference.predict(sample[None], float(scheduler.timesteps[place]), states, scale)
            for place, sample in zip(samples.positions, samples.values, strict=True)
        ]
    )


def read_row(reference: Reference, case_set: CaseSet, case: Case, row: Row) -> dict[str, Array]:
    """Run the part of a case's graph over what a row reads; return its outputs (1, ...) by name."""
    wanted = list_wanted(case_set, row.text)
    if case.graph == "text_encoder":
        return {"text": reference.encode(case_set.texts[row.text])[None]}
    if case.graph == "vae_decoder":
        return {"pictures": reference.decode(wanted["latents"].values)}
    if case.graph == "vae_encoder":
        mean, deviation = reference.encode_pictures(wanted["pictures"].values)
        return {"mean": mean, "deviation": deviation}
    place = np.array([row.ends[-1] - 1])
    sample = Known(place, wanted["sample"].find_values(place))
    return {"noise": predict_again(reference, case_set, wanted["text"].values, sample)}
