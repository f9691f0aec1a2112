"""`planforge inspect` of a store of vectors and of an index of texts, and of folders that are neither."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from planforge.runtime import TextEncoder
from planforge.runtime.apps.commands.tables import format_size
from planforge.runtime.search.vector_store import write_store

from ..helpers.cli import error_line, planforge
from ..helpers.search import HASH, LENGTH, M, list_chunks, make_index, make_texts, make_tokenizer

DOCUMENTS = ["the cat sat on the mat", "a dog ran away", "he saw her"]


@pytest.fixture(scope="module")
def encoder(retrieval_bundle: Callable[[str], Path]) -> Path:
    return retrieval_bundle("qwen3")


@pytest.fixture(scope="module")
def store(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspected") / "store"
    with TextEncoder.load(encoder) as model:
        write_store(model, DOCUMENTS, folder, truncate_dim=24)
    return folder


@pytest.fixture
def index(tmp_path: Path) -> Path:
    make_index(tmp_path / "index")
    return tmp_path / "index"


def show(folder: Path) -> str:
    """What is printed, with one space between two words."""
    done = planforge("inspect", folder)
    assert done.returncode == 0, done.stderr
    return re.sub(" +", " ", done.stdout)


def list_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_a_store_of_vectors(store: Path, encoder: Path) -> None:
    manifest = json.loads((encoder / "manifest.json").read_text(encoding="utf-8"))
    record = json.loads((store / "store.json").read_text(encoding="utf-8"))
    rows, width = np.load(store / "vectors.npy").shape
    told = json.loads(planforge("inspect", store, "--json").stdout)
    assert told.pop("bytes") == list_sizes(store)
    assert told == record and (told["rows"], told["size"]) == (rows, width) == (3, 24)
    text = show(store)
    for line in (
        f"{store}: a store of vectors",
        "documents 3",
        "width 24 numbers in float32",
        "compared by cosine",
        f"made by export {manifest['export_id'][:8]} in fp32",
        f"prompts {record['prompts'][:8]}",
        "options truncate_dim 24",
        f"size {format_size(sum(list_sizes(store).values()))}: vectors.npy 416 B, store.json ",
        "vectors.npy 416 B there, not hashed",
    ):
        assert line in text, text


def test_an_index_of_texts(index: Path) -> None:
    texts = make_texts()
    chunks = len(list_chunks(texts))
    tokens = sum(len(make_tokenizer().encode(text)) for text in texts.values())
    told = json.loads(planforge("inspect", index, "--json").stdout)
    assert (told.pop("chunks"), told.pop("tokens"), told.pop("bytes")) == (chunks, tokens, list_sizes(index))
    assert told == json.loads((index / "index.json").read_text(encoding="utf-8"))
    text = show(index)
    for line in (
        f"{index}: an index of texts",
        "documents 10",
        f"chunks {chunks:,} of {M} tokens",
        f"neighbours a chunk and what follows it, {LENGTH} tokens",
        f"tokens {tokens:,}",
        "keys n-grams of tokens",
        f"tokenizer {HASH[:8]}, {make_tokenizer().vocab_size:,} tokens",
    ):
        assert line in text, text


def test_the_encoder_of_an_index_is_named(encoder: Path, tmp_path: Path) -> None:
    with TextEncoder.load(encoder) as model:
        make_index(tmp_path / "index", keys=model)
    export_id = json.loads((encoder / "manifest.json").read_text(encoding="utf-8"))["export_id"]
    text = " ".join(show(tmp_path / "index").split())
    assert f"keys 32 numbers of an encoder: export {export_id[:8]} in fp32, {encoder}" in text


def test_damaged_folders_are_named(store: Path, index: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "copy"))
    (copy / "vectors.npy").unlink()
    (index / "tokens.npy").write_bytes(b"short")
    assert "vectors.npy 416 B MISSING" in show(copy)
    assert re.search(r"tokens\.npy \S+ .B CHANGED: has 5 B", show(index))
    record = json.loads((copy / "store.json").read_text(encoding="utf-8"))
    for change, words in (
        ({"rows": 0}, "store.json: store.rows is 0, and must be 1 to"),
        ({"format": 9}, "store.json is not that of a store that this version reads"),
        ({"files": {"../x": {}}}, "store.json names '../x', which is not a file of an array"),
    ):
        (copy / "store.json").write_text(json.dumps(record | change), encoding="utf-8")
        line = error_line("inspect", copy, code=1)
        assert f"{copy}: {words}" in line and "planforge index" not in line
    (index / "index.json").write_text("{", encoding="utf-8")
    assert f"{index}: index.json is not valid JSON" in error_line("inspect", index, code=1)


def test_a_folder_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("keep me", encoding="utf-8")
    assert f"{tmp_path} is not a bundle" in error_line("inspect", tmp_path)
    (tmp_path / "index.json").write_text("{}", encoding="utf-8")
    assert f"{tmp_path}: index.json is not that of an index" in error_line("inspect", tmp_path, code=1)
