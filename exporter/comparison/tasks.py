"""The examiner of each task: a new task is a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ...runtime.apps.check.case import CaseSet, from_arrays, to_arrays
from ...runtime.apps.check.files import Arrays
from ...runtime.bundle.bundle import Bundle
from ...runtime.progress import Report, StageCounter
from ..levels import FULL, Level
from ..reference import translation_samples
from ..reference.kept_answers import KEPT, compute_key, keep_answers, read_answers, read_limit
from ..tasks import decoder, decoder_answers, encoder, encoder_answers
from .decoders import DecoderExaminer
from .encoders import EncoderExaminer
from .examiner import Examiner, Progress
from .translators import TranslationExaminer

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel

AnyExaminer: TypeAlias = Examiner[Any]
Choose: TypeAlias = "Callable[[ReferenceModel, Bundle, Sequence[str], int, Level], CaseSet]"
Answer: TypeAlias = "Callable[[ReferenceModel, Bundle, CaseSet, Report], CaseSet]"


class Samples(Protocol):
    """A module that asks PyTorch what a task's graphs must reproduce."""

    def choose_questions(
        self, model: ReferenceModel, bundle: Bundle, texts: Sequence[str], seed: int, level: Level
    ) -> Any:
        """Return what to ask: besides the model, all that the answers depend on."""

    def answer(self, model: ReferenceModel, bundle: Bundle, questions: Any, report: Report) -> Any:
        """Return what the model computes."""

    def restore(self, model: ReferenceModel, questions: Any, arrays: Arrays) -> Any:
        """Return the same, computed in an earlier run."""

    def to_arrays(self, expected: Any, whole: bool) -> Arrays:
        """Return what the model computed, as a file can keep it."""

    def from_arrays(self, arrays: Arrays) -> Any:
        """Return what golden data keeps of it."""


class CaseSamples:
    """Cases whose answers are a part of them."""

    def __init__(self, choose: Choose, answer: Answer, thin: Callable[[CaseSet], CaseSet]) -> None:
        self.choose_questions = choose
        self.ask = answer
        self.thin = thin

    def answer(self, model: ReferenceModel, bundle: Bundle, questions: CaseSet, report: Report) -> CaseSet:
        return self.ask(model, bundle, questions, report)

    @staticmethod
    def restore(model: ReferenceModel, questions: CaseSet, arrays: Arrays) -> CaseSet:
        del model
        kept = from_arrays(arrays)
        return replace(questions, texts=kept.texts, answers=kept.answers)

    def to_arrays(self, expected: CaseSet, whole: bool) -> Arrays:
        return to_arrays(expected if whole else self.thin(expected))

    from_arrays = staticmethod(from_arrays)


TASKS: dict[str, tuple[type[AnyExaminer], Samples]] = {
    "text-generation": (
        DecoderExaminer,
        CaseSamples(decoder.choose, decoder_answers.answer, decoder_answers.thin_for_file),
    ),
    "text-encoding": (
        EncoderExaminer,
        CaseSamples(encoder.choose, encoder_answers.answer, encoder_answers.thin_for_file),
    ),
    "translation": (TranslationExaminer, translation_samples),
}


def examine_model(
    bundle: Bundle,
    model: ReferenceModel,
    texts: Sequence[str],
    progress: Progress = lambda _: None,
    seed: int = 0,
    level: Level = FULL,
    checkpoint: str = "",
) -> AnyExaminer:
    """Return the bundle's examiner, with what the model computes for the texts and for what a seed draws.

    `checkpoint` is the hash of the files that the model was loaded from. With it the model's answers are
    kept, and those of an earlier run are taken; but "full" asks anew.
    """
    kind, samples = TASKS[bundle.manifest.task]
    questions = samples.choose_questions(model, bundle, texts, seed, level)
    key = ""
    if checkpoint and level is not FULL and read_limit():
        key = compute_key(checkpoint, model, questions)
        if (arrays := read_answers(key)) is not None:
            progress(f"reading PyTorch's answers, {KEPT}")
            expected = samples.restore(model, questions, arrays)
            return kind(bundle, expected, level=level, answers_kept=True)
    stage = "computing the reference in PyTorch"
    progress(stage)
    expected = samples.answer(model, bundle, questions, StageCounter(progress, stage, "parts"))
    if key:
        keep_answers(key, samples.to_arrays(expected, whole=True))
    return kind(bundle, expected, level=level)


def examine_golden(bundle: Bundle, arrays: Arrays) -> AnyExaminer:
    """Return the bundle's examiner, with the results that golden data keeps; KeyError if one is missing."""
    kind, samples = TASKS[bundle.manifest.task]
    return kind(bundle, samples.from_arrays(arrays))
