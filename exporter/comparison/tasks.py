"""The examiner of each task: a new task is a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ...runtime.bundle.bundle import Bundle
from ...runtime.diagnostics.golden.files import Arrays
from ...runtime.progress import Report, StageCounter
from ..levels import FULL, Level
from ..reference import decoder_samples, encoder_samples, translation_samples
from .decoders import DecoderExaminer
from .encoders import EncoderExaminer
from .examiner import Examiner, Progress
from .translators import TranslationExaminer

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel

AnyExaminer: TypeAlias = Examiner[Any]

Expect: TypeAlias = "Callable[[ReferenceModel, Bundle, Sequence[str], Report, int, Level], Any]"
# What examines it, what computes the model's results, and what reads them from golden data.
EXAMINERS: dict[str, tuple[type[AnyExaminer], Expect, Callable[[Arrays], Any]]] = {
    "text-generation": (DecoderExaminer, decoder_samples.expect, decoder_samples.from_arrays),
    "text-encoding": (EncoderExaminer, encoder_samples.expect, encoder_samples.from_arrays),
    "translation": (TranslationExaminer, translation_samples.expect, translation_samples.from_arrays),
}


def examine_model(
    bundle: Bundle,
    model: ReferenceModel,
    texts: Sequence[str],
    progress: Progress = lambda _: None,
    seed: int = 0,
    level: Level = FULL,
) -> AnyExaminer:
    """Return the bundle's examiner, with what the model computes for the texts and for what a seed draws."""
    kind, expect, _ = EXAMINERS[bundle.manifest.task]
    stage = "computing the reference in PyTorch"
    progress(stage)
    report = StageCounter(progress, stage, "parts")
    return kind(bundle, expect(model, bundle, texts, report, seed, level), level=level)


def examine_golden(bundle: Bundle, arrays: Arrays) -> AnyExaminer:
    """Return the bundle's examiner, with the results that golden data keeps; KeyError if one is missing."""
    kind, _, read = EXAMINERS[bundle.manifest.task]
    return kind(bundle, read(arrays))
