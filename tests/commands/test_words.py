"""Commands with a file of word vectors, and with the bundle of one, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planforge.runtime import WordVectors

from ..helpers.cli import error_line, planforge


def test_neighbours_of_words(words_bundle: Path) -> None:
    done = planforge("run", words_bundle, "king", "man", "--top-k", "2")
    with WordVectors.load(words_bundle) as model:
        wanted = {word: model.neighbours(word, 2) for word in ("king", "man")}
    lines = [
        line
        for word, found in wanted.items()
        for line in (f"{word}:", *(f"{near.similarity:.4f}  {near.word}" for near in found))
    ]
    assert done.stdout.splitlines() == lines


def test_an_analogy_as_json(words_bundle: Path) -> None:
    done = planforge("run", words_bundle, "king", "woman", "--negative", "man", "--top-k", "1", "--json")
    answer = json.loads(done.stdout)
    assert answer["positive"] == ["king", "woman"] and answer["negative"] == ["man"]
    (neighbour,) = answer["neighbours"]
    assert neighbour["word"] == "queen" and 0.5 < neighbour["similarity"] < 1


def test_a_sum_of_words_without_one_to_take_away(words_bundle: Path) -> None:
    done = planforge("run", words_bundle, "king", "man", "--together", "--top-k", "3")
    with WordVectors.load(words_bundle) as model:
        wanted = model.analogy(["king", "man"], k=3)
    assert done.stdout.splitlines() == [f"{near.similarity:.4f}  {near.word}" for near in wanted]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "nowhere"), "there is no vector of 'nowhere' among 400 words"),
        (("run", "king", "--temperature", "1"), "--temperature cannot be used with"),
        (("run", "king", "--task", "embed"), "this bundle finds words that mean alike"),
        (("run", "king", "--pair", "man"), "--pair cannot be used with the task neighbours"),
        (("bench",), "finds words that mean alike"),
        (("explain", "king"), "finds words that mean alike"),
        (("package", "-o", "x", "--for", "optimum"), "optimum-onnx takes"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(words_bundle: Path, arguments: tuple[str, ...], words: str) -> None:
    command, *rest = arguments
    assert words in error_line(command, words_bundle, *rest)


def test_bad_vectors_are_refused_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "vectors.txt"
    file.write_text("3 2\na 1.25 2.5\nb 1.25 2.5\n")
    line = error_line("export", file, "-o", tmp_path / "bundle", code=1)
    assert f"{file}: the first line says 3 words, and the file has 2" in line
    assert not (tmp_path / "bundle").exists()


def test_a_bundle_is_compared_with_the_file_again(words_bundle: Path) -> None:
    """`verify` finds the file beside the bundle, and selftest has golden data."""
    done = planforge("verify", words_bundle, "--only", "words.portable.fp32", "--level", "quick")
    assert done.returncode == 0, done.stderr
    done = planforge("selftest", words_bundle)
    assert done.returncode == 0, done.stderr
    assert "skipped" not in done.stdout
