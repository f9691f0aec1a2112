"""Chooses the cases of word vectors: questions of words that texts have, and of words at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.apps.check.case import Case, CaseSet, Known, Measure, Row, Text
from ...runtime.apps.check.files import choose_evenly
from ...runtime.apps.check.metrics import ValueMetrics, VectorMetrics
from ...runtime.bundle.bundle import Bundle
from ...runtime.text.tokenizer import Tokenizer
from ...runtime.words.word_vectors import GRAPH
from ..levels import FULL, Level
from .random_cases import count_weights

if TYPE_CHECKING:
    from ..reference_model import ReferenceModel

MEASURES = (
    Measure("vectors", ("vectors",), VectorMetrics.LIMITED, "vectors."),
    Measure("values", ("similarity",), ValueMetrics.LIMITED, "similarity."),
    Measure("values", ("nearest",), ValueMetrics.LIMITED, "nearest."),
)
OUTPUTS = ("vectors", "similarity", "nearest", "scores")  # `scores` tells what `nearest` is worth
LEAST = 6  # questions of texts, and at random
MOST = 24
USUAL = 5  # words of a question at random, at most
CALIBRATED = 8  # questions to calibrate with


def choose(
    model: ReferenceModel, bundle: Bundle, texts: Sequence[str], seed: int = 0, level: Level = FULL
) -> CaseSet:
    """Return the cases of the graph, without answers; a level below "full" has fewer."""
    defaults = bundle.manifest.words
    assert defaults is not None
    tokenizer = Tokenizer.from_file(bundle.path(str(bundle.manifest.tokenizer["files"][0])))
    count = tokenizer.vocab_size
    most = int(np.clip(level.count_samples(count_weights(model), defaults.max_length), LEAST, MOST))
    random = np.random.default_rng(seed)
    longest = min(defaults.max_length, count)
    usual = min(USUAL, longest)
    found = read_questions(tokenizer, texts, longest)
    questions = (
        Text((0,)),
        Text((count - 1,)),
        *(found[i] for i in choose_evenly(len(found), min(most, len(found)))),
        *(sample_question(random, count, 1 + number % usual) for number in range(most)),
        sample_question(random, count, longest),
    )
    rows = [Row(number, (len(text.tokens),)) for number, text in enumerate(questions)]
    single = [make_case("single questions", row) for row in rows]
    padded = make_case(f"a batch of {len(rows)}, padded", *rows, is_padded=True)
    few = tuple(make_case("a few", row) for row in (rows[0], rows[-2]))
    return CaseSet(
        texts=questions,
        cases=(*single, padded),
        answers={
            output: {number: wanted(output, text) for number, text in enumerate(questions)}
            for output in OUTPUTS
        },
        left_out=() if level is FULL else (f"questions beyond {most}",) if most < MOST else (),
        calibration=tuple(sample_question(random, count, usual) for _ in range(CALIBRATED)),
        few=few,
        replays=few[-1:],
        ranges=(make_case("ranges", *rows),),
    )


def wanted(output: str, question: Text) -> Known:
    """Return the places of a question whose values are compared: every word's, or its only one."""
    return Known.wanted(range(len(question.tokens)) if output == "vectors" else (0,))


def read_questions(tokenizer: Tokenizer, texts: Sequence[str], longest: int) -> list[Text]:
    """Return the words of each text that have vectors, each once; texts without any are left out."""
    questions = []
    for text in texts:
        ids = dict.fromkeys(tokenizer.find_id(word) for word in text.split())
        known = [number for number in ids if number is not None][:longest]
        if known:
            questions.append(Text(tuple(known)))
    return questions


def sample_question(random: np.random.Generator, count: int, length: int) -> Text:
    """Return a question of random words, all different; of several the last one is taken away."""
    ids = random.choice(count, length, replace=False)
    return Text(tuple(ids.tolist()), segments=(0,) * (length - 1) + (int(length > 1),))


def make_case(name: str, *rows: Row, is_padded: bool = False) -> Case:
    """Return a case that asks questions at once."""
    return Case(name, GRAPH, rows, MEASURES, "once", is_padded=is_padded)
