"""The examiner of each task: a new task is a line here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ...runtime.bundle.bundle import Bundle
from ...runtime.diagnostics.golden.files import Arrays
from .decoders import DecoderExaminer
from .encoders import EncoderExaminer
from .examiner import Examiner
from .translators import TranslationExaminer

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel

AnyExaminer: TypeAlias = Examiner[Any]

EXAMINERS: dict[str, type[AnyExaminer]] = {
    "text-generation": DecoderExaminer,
    "text-encoding": EncoderExaminer,
    "translation": TranslationExaminer,
}


def examine_model(bundle: Bundle, model: ReferenceModel, texts: Sequence[str]) -> AnyExaminer:
    """Return the bundle's examiner, with what the model computes for the texts."""
    return EXAMINERS[bundle.manifest.task].from_model(bundle, model, texts)


def examiner_from_golden(bundle: Bundle, arrays: Arrays) -> AnyExaminer:
    """Return the bundle's examiner, with the results that golden data keeps.

    Raises:
        KeyError: an array is missing.
    """
    return EXAMINERS[bundle.manifest.task].from_arrays(bundle, arrays)
