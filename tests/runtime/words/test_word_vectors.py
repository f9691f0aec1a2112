"""`WordVectors` against gensim: vectors, neighbours and analogies, and questions that cannot be."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gensim.models import KeyedVectors

from planforge.runtime import WordVectors
from planforge.runtime.errors import InputError

from ...helpers.words import DIMENSIONS, WORDS, make_vectors

# A product of unit vectors rounds by 2**-24 for each of its terms at most, and so does its reference.
COSINE = 2 * DIMENSIONS * 2.0**-24
QUESTIONS = [
    (["queen"], []),
    (["Zoë"], []),
    (["king", "woman"], ["man"]),
    (["w1", "w1", "w2"], ["w3", "new york"]),
    ([f"w{i}" for i in range(60)], ["the"]),
]


@pytest.fixture(scope="module")
def keyed() -> KeyedVectors:
    keyed = KeyedVectors(DIMENSIONS)
    keyed.add_vectors(WORDS, make_vectors())
    return keyed


@pytest.fixture(scope="module")
def model(words_bundle: Path) -> Iterator[WordVectors]:
    with WordVectors.load(words_bundle, precision="fp32") as opened:
        yield opened


@pytest.mark.parametrize(("positive", "negative"), QUESTIONS)
def test_analogies_are_gensims(
    model: WordVectors, keyed: KeyedVectors, positive: list[str], negative: list[str]
) -> None:
    wanted = keyed.most_similar(positive, negative, topn=30)
    found = model.analogy(positive, negative, 30)
    cosines = np.array([cosine for _, cosine in wanted])
    assert np.diff(cosines).max() < -2 * COSINE  # no two are so near that rounding may exchange them
    assert [neighbour.word for neighbour in found] == [word for word, _ in wanted]
    np.testing.assert_allclose([neighbour.similarity for neighbour in found], cosines, rtol=0, atol=COSINE)


def test_neighbours_and_a_known_analogy(model: WordVectors, keyed: KeyedVectors) -> None:
    found = model.neighbours("man", 3)
    assert [neighbour.word for neighbour in found] == [word for word, _ in keyed.most_similar("man", topn=3)]
    assert model.analogy(["king", "woman"], "man", 1)[0].word == "queen"
    assert len(model.neighbours("the")) == 10


def test_vectors_are_the_files(model: WordVectors) -> None:
    # A direction and a length are rounded, and so is their product.
    np.testing.assert_allclose(model.vectors(WORDS), make_vectors(), rtol=4 * 2.0**-24, atol=0)
    assert np.array_equal(model.vector("king"), model.vectors(["king"])[0])
    assert model.vectors([]).shape == (0, DIMENSIONS)
    assert "king" in model and "King" not in model and 5 not in model


def test_an_unknown_word_has_gloves_vector_and_no_neighbours(
    model: WordVectors, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "planforge"):
        assert np.array_equal(model.vector("nowhere"), model.vector("<unk>"))
    assert "no vector of 'nowhere'; that of the unknown word is taken" in caplog.text
    with pytest.raises(InputError, match=r"there is no vector of 'nowhere' among 400 words$"):
        model.neighbours("nowhere")
    with pytest.raises(InputError, match="no vector of 'King' among 400 words; did you mean 'king'"):
        model.neighbours("King")


def test_questions_that_cannot_be_are_refused(model: WordVectors) -> None:
    wrong: Any = model
    with pytest.raises(InputError, match="k=255 must be an integer from 1 to 253"):
        model.analogy(["king", "woman"], ["man"], 255)
    with pytest.raises(InputError, match="a question has 1 to 64 words, not 0"):
        model.analogy([])
    with pytest.raises(InputError, match="a question has 1 to 64 words, not 65"):
        model.analogy(["the"] * 65)
    with pytest.raises(InputError, match="added and those that are taken away are the same"):
        model.analogy(["king", "man"], ["man", "king"])
    with pytest.raises(InputError, match="a word must be a str, not int"):
        wrong.vectors([5])
    with pytest.raises(InputError, match=r"vector\(\) takes one"):
        model.vectors("king")


def test_fp16_and_int8_find_most_of_the_same(words_bundle: Path, keyed: KeyedVectors) -> None:
    """Random vectors are nearer to one another than words are: docs/words.md has figures of real ones."""
    for precision, least in (("fp16", 0.95), ("int8", 0.8)):
        with WordVectors.load(words_bundle, precision=precision) as model:
            for positive, negative in QUESTIONS:
                wanted = {word for word, _ in keyed.most_similar(positive, negative, topn=40)}
                found = {neighbour.word for neighbour in model.analogy(positive, negative, 40)}
                assert len(wanted & found) >= least * 40


def test_few_words_without_one_for_the_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the folder that a file became, nothing is left behind the export."""
    from planforge.exporter import export

    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    file = tmp_path / "vectors.txt"
    file.write_text("a 1 2\nb 3 1\nzero 0 0\n", encoding="utf-8")
    export(file, tmp_path / "bundle", target="cpu", precision="fp32")
    assert list(temporary.glob("planforge-words-*")) == []
    with WordVectors.load(tmp_path / "bundle") as model:
        assert [neighbour.word for neighbour in model.neighbours("a", 2)] == ["b", "zero"]
        with pytest.raises(InputError, match="there is no vector of 'c' among 3 words"):
            model.vector("c")
        with pytest.raises(InputError, match="have the vector 0, to which no word is near"):
            model.neighbours("zero", 1)
