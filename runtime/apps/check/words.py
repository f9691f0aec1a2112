"""Runs the cases of word vectors.

T words of a question, K words that the graph finds, N words whose scores are kept
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...backends.backend import Array
from ...words.word_vectors import GRAPH, Question, pad_questions
from .case import Case, CaseSet, Integers, Known, Location, Text
from .images import PartsEngine
from .judge import Seen


@dataclass(frozen=True)
class WordsEngine(PartsEngine):
    """Runs the graph of word vectors.

    The ids of the words that it finds are compared by PyTorch's scores of these words: words that are equally
    near may change places.
    """

    def run(self, case_set: CaseSet, case: Case) -> Iterator[Seen]:
        questions = [make_question(case_set.texts[row.text]) for row in case.rows]
        results = self.parts[GRAPH].run(pad_questions(questions))
        for number, row in enumerate(case.rows):
            own = {output: array[number] for output, array in results.items()}
            answers = {output: by_text.get(row.text) for output, by_text in case_set.answers.items()}
            yield Seen(row.text, find_values(own, answers), Location(case, 0, number))


def find_values(results: Mapping[str, Array], answers: Mapping[str, Known | None]) -> dict[str, Known]:
    """Return a question's results where PyTorch's answers are known: T vectors, and K values at one place."""
    values = {}
    for output, array in results.items():
        known = answers.get(output)
        if known is None:
            continue
        if output == "vectors":
            values[output] = Known(known.positions, array[known.positions])
            continue
        scores = answers["scores"]
        assert scores is not None
        own = find_scores(scores, array) if output == "nearest" else array
        values[output] = Known(known.positions, own[None])
    return values


def make_question(text: Text) -> Question:
    """Return the question of a text: words of the second segment are taken away."""
    segments = text.segments or (0,) * len(text.tokens)
    return Question(text.tokens, [1.0 - 2.0 * segment for segment in segments])


def find_scores(known: Known, ids: Integers) -> Array:
    """Return PyTorch's scores (K,) of words; where none is kept the least that is, as it is no more."""
    places = np.minimum(np.searchsorted(known.positions, ids), len(known.positions) - 1)
    is_kept = known.positions[places] == ids
    scores: Array = np.where(is_kept, known.values[places], known.values.min())
    return scores
