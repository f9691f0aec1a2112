"""Computes PyTorch's vectors of texts and of pictures.

F features of a vector
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...runtime.apps.check.case import Case, CaseSet, Known, Row, Text
from ...runtime.apps.check.image_text import LikenessEngine, make_pixels
from ...runtime.backends.backend import Array
from ...runtime.backends.part import Part
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from .base import OpenProgram, list_wanted
from .image_answers import to_array, to_tensor

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel
    from .rounding import Rounding


@dataclass(frozen=True)
class Reference:
    """A model that compares pictures with texts, in PyTorch."""

    model: Any
    size: int  # of its pictures

    def encode(self, text: Text) -> dict[str, Array]:
        """Return the vector (1, F) of a text or a picture, by the output's name."""
        import torch

        with torch.no_grad():
            if text.noise is None:
                return {"text": to_array(self.model.text.embed(torch.tensor([text.tokens])))}
            return {"image": to_array(self.model.vision(to_tensor(make_pixels(text.noise, self.size))))}


def open_reference(model: ReferenceModel, bundle: Bundle, rounding: Rounding | None = None) -> Reference:
    """Return the reference that answers in the model's current precision."""
    assert bundle.manifest.likeness is not None
    return Reference(model, bundle.manifest.likeness.size)


def open_engine(bundle: Bundle, artifact: Artifact, open_program: OpenProgram) -> LikenessEngine:
    """Open one graph."""
    assert bundle.manifest.likeness is not None
    part = Part(open_program(artifact), artifact)
    return LikenessEngine({artifact.graph: part}, bundle.manifest.likeness)


def calibrate(reference: Reference, case_set: CaseSet) -> None:
    """Run PyTorch over the texts and pictures to calibrate with."""
    for text in case_set.calibration:
        reference.encode(text)


def answer_texts(
    reference: Reference, case_set: CaseSet, numbers: Sequence[int]
) -> Iterator[tuple[int, dict[str, Known]]]:
    """Yield PyTorch's vectors, by the numbers of texts and pictures."""
    for number in numbers:
        values = reference.encode(case_set.texts[number])
        wanted = list_wanted(case_set, number)
        yield number, {output: Known(known.positions, values[output]) for output, known in wanted.items()}


def read_row(reference: Reference, case_set: CaseSet, case: Case, row: Row) -> dict[str, Array]:
    """Run PyTorch over what a row reads; return its output (1, F) by name."""
    return reference.encode(case_set.texts[row.text])
