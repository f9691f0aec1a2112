"""The page's table of rankings is the recorded run's, and its figures are what they say."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.common import RESULTS
from benchmarks.retrieval_ranking import RESULT, compare, list_refusals, make_table
from benchmarks.verses import Corpus, sample_words

from ..helpers.paths import ROOT


def test_the_table_is_that_of_the_recorded_run() -> None:
    result = json.loads((RESULTS / f"{RESULT}.json").read_text(encoding="utf-8"))
    assert make_table(result) in (ROOT / "docs/retrieval.md").read_text(encoding="utf-8")


def test_figures_of_two_rankings() -> None:
    """One query's document leaves the first ten of twelve, another's ranking is turned round."""
    wanted = np.linspace(1, 0, 12, dtype=np.float32)[None].repeat(2, axis=0)
    scores = wanted.copy()
    scores[0, 9] = -1
    scores[1, :10] = scores[1, 9::-1]
    corpus = Corpus({str(number): "" for number in range(12)}, ["", ""], np.array([9, 9]), [])
    assert compare(wanted, wanted, corpus) == {"agreement": 1.0, "tau": 1.0, "recall": 1.0}
    assert compare(scores, wanted, corpus) == {
        "agreement": pytest.approx(0.95),
        "tau": pytest.approx((53 / 55 - 1) / 2, abs=1e-4),
        "recall": 0.5,
    }


def test_a_query_is_some_of_a_verses_words_in_their_order() -> None:
    text = "In the beginning God created the heaven and the earth, which was without form."
    query = sample_words(text, np.random.default_rng(0)).split()
    places = [text.index(word) for word in query]
    assert len(query) == 3 and places == sorted(places) and all(len(word) > 3 for word in query)


def test_the_worst_of_each_figure_that_refuses_is_told() -> None:
    message = (
        "int8, one by one: vector.max_error is 1.53, at most 1 is allowed, at first in row 0\n"
        "int8, 512 tokens: vector.max_error is 1.09, at most 1 is allowed;"
        " rank_changes is 0.06, at most 0.05 is allowed (PyTorch itself, in int8: 0.07)"
    )
    assert list_refusals(message) == {
        "vector.max_error": "1.53, at most 1",
        "rank_changes": "0.06, at most 0.05",
    }
