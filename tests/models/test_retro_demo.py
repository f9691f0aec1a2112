"""retro-demo predicts held-out books better with the right neighbours, and not with others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from planforge.exporter import export
from planforge.exporter.checkpoints.source import DEMOS
from planforge.runtime import TextGenerator
from planforge.runtime.decoding.retrieval import Found
from planforge.runtime.generate.retrieval_generator import RetrievalGenerator
from planforge.runtime.search.neighbour_index import NeighbourIndex

from ..helpers.cli import planforge

FOLDER = DEMOS / "retro-demo"
HELD_OUT = ("2Ki", "Mark")
LEAST_GAIN = 0.03
WINDOW = 256  # tokens
PARTS = 40  # of a book, that are scored
MOST_BYTES = 15_000_000


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retro-demo") / "bundle"
    export("retro-demo", folder, target=["cpu"], precision=["fp32", "int8"])
    return folder


@pytest.fixture(scope="module")
def index(bundle: Path) -> Path:
    folder = bundle.parent / "index"
    done = planforge("index", FOLDER / "texts", "-o", folder, "--for", bundle)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module", params=["fp32", "int8"])
def model(request: pytest.FixtureRequest, bundle: Path, index: Path) -> Iterator[RetrievalGenerator]:
    with TextGenerator.load(bundle, index=index, precision=request.param) as opened:
        assert isinstance(opened, RetrievalGenerator)
        yield opened


def read_book(name: str) -> str:
    return (FOLDER / "held-out" / f"{name}.txt").read_text(encoding="utf-8")


def score(model: RetrievalGenerator) -> float:
    """Return the mean log-probability of tokens behind a complete chunk, in windows all over both books."""
    chunk = model.decoder.encoder.defaults.chunk_length  # type: ignore[attr-defined]
    parts = []
    for name in HELD_OUT:
        ids = model.tokenizer.encode(read_book(name))
        begins = np.linspace(0, len(ids) - WINDOW, PARTS).astype(int).tolist()
        parts += [model.score(ids[begin : begin + WINDOW]).logprobs[chunk:] for begin in begins]
    return float(np.mean(np.concatenate(parts)))


def find_random(
    index: NeighbourIndex, texts: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]]
) -> list[list[Found]]:
    """Return the neighbours of random chunks of `texts` in place of those of `chunks`."""
    random = np.random.default_rng(len(chunks))
    asked = [texts[i] for i in random.integers(0, len(texts), len(chunks)).tolist()]
    return [list(neighbours) for neighbours in index.find(asked, 2)]


def test_neighbours_help_and_others_do_not(
    model: RetrievalGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = score(model)
    opened = model.index
    assert opened is not None
    ids = model.tokenizer.encode(read_book("Mark"))
    chunk = model.decoder.encoder.defaults.chunk_length  # type: ignore[attr-defined]
    texts = [ids[begin : begin + chunk] for begin in range(0, len(ids) - chunk, chunk)]
    monkeypatch.setattr(model.decoder, "find", lambda chunks: find_random(opened, texts, chunks))
    others = score(model)
    monkeypatch.setattr(model.decoder, "find", lambda chunks: [[] for _ in chunks])
    none = score(model)
    assert 1 - right / none >= LEAST_GAIN
    assert 1 - others / none < LEAST_GAIN / 3


def test_held_out_books_are_in_no_index(index: Path, model: RetrievalGenerator) -> None:
    assert model.index is not None
    assert len(model.index.documents) == 64
    assert not {f"{name}.txt" for name in HELD_OUT} & set(model.index.documents)
    for name in HELD_OUT:
        assert model.index.measure_overlap(model.tokenizer.encode(read_book(name))) < 0.05


def test_weights_and_index_are_small(index: Path) -> None:
    weights = (FOLDER / "model.safetensors").stat().st_size
    assert weights + sum(file.stat().st_size for file in index.iterdir()) <= MOST_BYTES


def test_training_json_has_the_figures() -> None:
    facts = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
    books = [facts["bits_per_character"][name] for name in HELD_OUT]
    for bits in books:
        assert bits["below_none"] == pytest.approx(1 - bits["right"] / bits["none"], abs=1e-3)
        assert bits["right"] < bits["none"] < bits["random"]
        assert bits["own_book_in_index"] < bits["own_book_left_out"]
    characters = [len(read_book(name)) for name in HELD_OUT]
    right = sum(n * bits["right"] for n, bits in zip(characters, books, strict=True))
    none = sum(n * bits["none"] for n, bits in zip(characters, books, strict=True))
    assert 1 - right / none >= LEAST_GAIN
