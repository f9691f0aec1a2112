"""Chooses the texts, verses of the Bible, of which an embedder's graph must find the same ones as the model.

A cosine says little of a search, whose best texts may lie close together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...runtime.apps.check.case import Case, CaseSet, Known, Measure, Row, Text
from ...runtime.apps.check.metrics import RankingMetrics
from ...runtime.bundle.artifact import DENSE, SPARSE, VECTORS, Artifact
from ...runtime.bundle.manifest import TensorSpec
from ...runtime.encode.results import MultiVector, SparseEmbedding
from ...runtime.encode.similarity import choose_function

VERSES = Path(__file__).with_name("verses.txt")
NAME = "order of real texts"
OUTPUTS = (DENSE, SPARSE, VECTORS)  # by which texts are searched


def add_ranking(
    case_set: CaseSet, artifacts: Sequence[Artifact], similarity: str, texts: Sequence[Text]
) -> CaseSet:
    """Return a set with a case of each graph that embeds texts, in which every text searches the others.

    Args:
        case_set: the other cases.
        artifacts: one of each graph.
        similarity: how the checkpoint compares two texts.
        texts: what is searched.
    """
    numbers = range(len(case_set.texts), len(case_set.texts) + len(texts))
    rows = tuple(Row(number, (len(text.tokens),)) for number, text in zip(numbers, texts, strict=True))
    answers = {name: dict(known) for name, known in case_set.answers.items()}
    cases = []
    for artifact in artifacts:
        specs = [spec for spec in artifact.outputs if spec.role in OUTPUTS]
        measures = tuple(make_measure(spec, similarity, len(specs) == 1) for spec in specs)
        if measures:
            cases.append(Case(NAME, artifact.graph, rows, measures, "once"))
        for spec in specs:
            for number, text in zip(numbers, texts, strict=True):
                places = range(len(text.tokens)) if spec.role == VECTORS else (0,)
                answers[spec.name][number] = Known.wanted(places)
    if not cases:
        return case_set
    return replace(
        case_set, texts=(*case_set.texts, *texts), cases=(*case_set.cases, *cases), answers=answers
    )


def make_measure(spec: TensorSpec, similarity: str, is_only: bool) -> Measure:
    """Return what is measured of an output; beside a vector, the checkpoint's similarity is the vector's."""
    if spec.role != DENSE:
        kind = SparseEmbedding if spec.role == SPARSE else MultiVector
        similarity = choose_function(similarity if is_only else "", kind)
    return Measure(
        "ranking", (spec.name,), RankingMetrics.LIMITED, f"{spec.name}.order.", similarity=similarity
    )


def drop_ranking(case_set: CaseSet) -> CaseSet:
    """Return a set without the texts that are ranked, which are too many for a file."""
    ranked = case_set.list_texts("ranking")
    if not ranked:
        return case_set
    others = range(ranked[0])
    return replace(case_set.restrict(others), texts=case_set.texts[: len(others)])
