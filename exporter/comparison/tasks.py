"""The row of each task: what it is compared by, what PyTorch answers, and what compares its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ...runtime.apps.check.case import CaseSet, from_arrays, to_arrays
from ...runtime.apps.check.files import Arrays
from ...runtime.bundle.bundle import Bundle
from ...runtime.progress import Report, StageCounter
from ..levels import FULL, Level
from ..reference.kept_answers import KEPT, compute_key, keep_answers, read_answers, read_limit
from ..tasks import (
    decoder,
    decoder_answers,
    encoder,
    encoder_answers,
    translator,
    translator_answers,
)
from .decoders import DecoderExaminer
from .encoders import EncoderExaminer
from .examiner import Examiner, Progress
from .translators import TranslationExaminer

if TYPE_CHECKING:
    from ..reference.model import ReferenceModel

AnyExaminer: TypeAlias = Examiner[Any]


@dataclass(frozen=True)
class Task:
    """What a task's graphs are compared by.

    Attributes:
        examiner: compares graphs.
        choose: returns cases without answers: besides the model, all that the answers depend on.
        answer: returns them with PyTorch's answers.
        answer_again: returns golden data's cases with PyTorch's answers of now.
    """

    examiner: type[AnyExaminer]
    choose: Callable[[ReferenceModel, Bundle, Sequence[str], int, Level], CaseSet]
    answer: Callable[[ReferenceModel, Bundle, CaseSet, Report], CaseSet]
    answer_again: Callable[[ReferenceModel, Bundle, CaseSet], CaseSet]


TASKS = {
    "text-generation": Task(
        DecoderExaminer, decoder.choose, decoder_answers.answer, decoder_answers.answer_again
    ),
    "text-encoding": Task(EncoderExaminer, encoder.choose, encoder_answers.answer, encoder_answers.answer),
    "translation": Task(
        TranslationExaminer, translator.choose, translator_answers.answer, translator_answers.answer
    ),
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
    task = TASKS[bundle.manifest.task]
    asked = task.choose(model, bundle, texts, seed, level)
    key = ""
    if checkpoint and level is not FULL and read_limit():
        key = compute_key(checkpoint, model, asked)
        if (arrays := read_answers(key)) is not None:
            progress(f"reading PyTorch's answers, {KEPT}")
            kept = from_arrays(arrays)
            answered = replace(asked, texts=kept.texts, answers=kept.answers)
            return task.examiner(bundle, answered, model=model, level=level, answers_kept=True)
    stage = "computing the reference in PyTorch"
    progress(stage)
    answered = task.answer(model, bundle, asked, StageCounter(progress, stage, "parts"))
    if key:
        keep_answers(key, to_arrays(answered))
    return task.examiner(bundle, answered, model=model, level=level)


def examine_golden(bundle: Bundle, arrays: Arrays) -> AnyExaminer:
    """Return the bundle's examiner, with the results that golden data keeps; KeyError if one is missing."""
    return TASKS[bundle.manifest.task].examiner(bundle, from_arrays(arrays))
