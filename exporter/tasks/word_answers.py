"""Computes PyTorch's answers to questions of word vectors.

V words, K neighbours, N words whose scores are kept
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...runtime.apps.check.case import Case, CaseSet, Known, Row, Text
from ...runtime.apps.check.words import WordsEngine, find_scores, make_question
from ...runtime.backends.backend import Array
from ...runtime.backends.part import Part
from ...runtime.bundle.bundle import Bundle
from ...runtime.bundle.manifest import Artifact
from ...runtime.words.word_vectors import pad_questions
from .base import OpenProgram, list_wanted
from .image_answers import is_known, to_array

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel
    from .rounding import Rounding

# Scores are kept of so many times as many words as a graph finds; a word beyond them is far from any place.
KEPT_SCORES = 4
Reference: TypeAlias = Any  # a model of `planforge.models.WordVectors`


def open_reference(model: ReferenceModel, bundle: Bundle, rounding: Rounding | None = None) -> Reference:
    """Return the reference that answers in the model's current precision."""
    return model


def open_engine(bundle: Bundle, artifact: Artifact, open_program: OpenProgram) -> WordsEngine:
    """Open the graph."""
    return WordsEngine({artifact.graph: Part(open_program(artifact), artifact)})


def ask(model: Reference, text: Text) -> dict[str, Array]:
    """Return the model's outputs (1, ...) for a question, and the scores (1, V) of all words."""
    import torch

    inputs = pad_questions([make_question(text)])
    with torch.no_grad():
        vectors, scores = model.compare(*map(torch.from_numpy, inputs.values()))
        similarity, nearest = model.ranking(scores)
    return {
        "vectors": to_array(vectors),
        "similarity": to_array(similarity),
        "nearest": nearest.numpy(),
        "scores": to_array(scores),
    }


def calibrate(reference: Reference, case_set: CaseSet) -> None:
    """Run PyTorch over the questions to calibrate with."""
    for text in case_set.calibration:
        ask(reference, text)


def answer_texts(
    reference: Reference, case_set: CaseSet, numbers: Sequence[int]
) -> Iterator[tuple[int, dict[str, Known]]]:
    """Yield PyTorch's answers to questions, by their numbers and outputs.

    What a rounded model finds is compared by the unrounded scores, where they are known already.
    """
    for number in numbers:
        known = list_wanted(case_set, number)
        found = ask(reference, case_set.texts[number])
        own = keep_best(found["scores"][0], KEPT_SCORES * found["nearest"].shape[1])
        exact = known["scores"] if is_known(known["scores"]) else own
        yield (
            number,
            {
                "vectors": Known(known["vectors"].positions, found["vectors"][0]),
                "similarity": Known(known["similarity"].positions, found["similarity"]),
                "nearest": Known(known["nearest"].positions, find_scores(exact, found["nearest"][0])[None]),
                "scores": own,
            },
        )


def keep_best(scores: Array, most: int) -> Known:
    """Return the largest of some scores (V,), by the ids of their words."""
    kept = np.argsort(-scores, kind="stable")[:most]
    places = np.sort(kept).astype(np.int64)
    return Known(places, scores[places])


def read_row(reference: Reference, case_set: CaseSet, case: Case, row: Row) -> dict[str, Array]:
    """Run PyTorch over the question of a row; return its outputs (1, ...) by name."""
    found = ask(reference, case_set.texts[row.text])
    return {name: found[name] for name in ("vectors", "similarity", "nearest")}
