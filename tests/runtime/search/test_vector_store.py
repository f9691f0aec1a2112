"""Search over documents against sentence-transformers' semantic_search, and stores that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers.util import semantic_search

from planforge.exporter import export
from planforge.runtime import TextEncoder
from planforge.runtime.errors import BundleNotFoundError, InputError, IntegrityError, ManifestError
from planforge.runtime.search import vector_store
from planforge.runtime.search.vector_store import VectorStore, write_store

from ...helpers.retrieval_folders import TEXT, write_folder

WORDS = TEXT.split()
RANDOM = np.random.default_rng(0)
DOCUMENTS = [" ".join(RANDOM.choice(WORDS, RANDOM.integers(3, 12))) for _ in range(300)]
QUERIES = ["cat on the mat", "who saw him"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles of three models, and a store of the first."""
    root = tmp_path_factory.mktemp("stores")
    for kind in ("qwen3", "splade", "colbert"):
        export(write_folder(kind, root / kind), root / f"{kind}-bundle", target=["cpu"], precision=["fp32"])
    with TextEncoder.load(root / "qwen3-bundle") as model:
        assert write_store(model, iter(DOCUMENTS), root / "store") == len(DOCUMENTS)
    return root


@pytest.fixture
def model(root: Path) -> Iterator[TextEncoder]:
    with TextEncoder.load(root / "qwen3-bundle") as model:
        yield model


def test_the_nearest_documents(root: Path, model: TextEncoder) -> None:
    queries = torch.from_numpy(model.embed(QUERIES, input_type="query"))
    documents = torch.from_numpy(model.embed(DOCUMENTS, input_type="document"))
    wanted = semantic_search(queries, documents, top_k=7)
    store = VectorStore.open(root / "store", model)
    store.check()
    assert len(store) == len(DOCUMENTS) and isinstance(store.vectors.base, np.memmap)
    for found in (store.search(QUERIES, 7), model.search(QUERIES, DOCUMENTS, 7)):
        for hits, theirs in zip(found, wanted, strict=True):
            assert [hit.index for hit in hits] == [one["corpus_id"] for one in theirs]
            scores = [float(one["score"]) for one in theirs]
            assert [hit.score for hit in hits] == pytest.approx(scores, abs=1e-5)
    assert store.search(QUERIES[0], 3) == store.search(QUERIES, 3)[0]
    assert [hit.text for hit in model.search(QUERIES[0], DOCUMENTS, 2)] == [
        DOCUMENTS[int(one["corpus_id"])] for one in wanted[0][:2]
    ]
    assert store.search([]) == [] and model.search([], DOCUMENTS) == [] and model.search("a", []) == []


def test_vectors_of_any_length_are_compared_in_parts(
    model: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_store, "ROWS", 64)
    write_store(model, DOCUMENTS, tmp_path / "store", normalize=False)
    queries = torch.from_numpy(model.embed(QUERIES, input_type="query", normalize=False))
    documents = torch.from_numpy(model.embed(DOCUMENTS, input_type="document", normalize=False))
    found = VectorStore.open(tmp_path / "store", model).search(QUERIES, 7)
    for hits, theirs in zip(found, semantic_search(queries, documents, top_k=7), strict=True):
        assert [hit.index for hit in hits] == [one["corpus_id"] for one in theirs]


@pytest.mark.parametrize("kind", ["splade", "colbert"])
def test_sparse_weights_and_late_interaction_search_too(root: Path, kind: str) -> None:
    with TextEncoder.load(root / f"{kind}-bundle") as model:
        embed = model.embed_sparse if kind == "splade" else model.embed_multi
        queries, documents = embed(QUERIES, input_type="query"), embed(DOCUMENTS, input_type="document")
        scores = model.similarity(queries, documents)
        for row, hits in zip(scores, model.search(QUERIES, DOCUMENTS, 5), strict=True):
            assert [hit.score for hit in hits] == pytest.approx(
                sorted(row.tolist(), reverse=True)[:5], rel=1e-4
            )


def test_stores_that_do_not_fit(root: Path, model: TextEncoder, tmp_path: Path) -> None:
    other = TextEncoder.load(root / "splade-bundle")
    with other, pytest.raises(InputError, match="has vectors of another export"):
        VectorStore.open(root / "store", other)
    with pytest.raises(BundleNotFoundError, match=r"is no store of vectors: it has no store\.json"):
        VectorStore.open(tmp_path, model)
    with pytest.raises(InputError, match="exists; pass force=True to replace it"):
        write_store(model, DOCUMENTS, root / "store")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("keep me")
    with pytest.raises(InputError, match="exists and is no store of vectors, so it is left alone"):
        write_store(model, DOCUMENTS, tmp_path / "mine", force=True)
    with pytest.raises(InputError, match="texts is one text"):
        write_store(model, "hello", tmp_path / "empty")
    with pytest.raises(InputError, match=r"a store belongs to a model that embeds texts.* not to a \w*Path"):
        write_store(tmp_path, DOCUMENTS, tmp_path / "empty")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a store belongs to a model that embeds texts"):
        VectorStore.open(root / "store", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="there are no texts"):
        write_store(model, [], tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]
    copy = Path(shutil.copytree(root / "store", tmp_path / "copy"))
    with (copy / "vectors.npy").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(IntegrityError, match=r"vectors\.npy has 1000 bytes, and store\.json says"):
        VectorStore.open(copy, model)
    (copy / "store.json").write_text(json.dumps({"kind": "other"}))
    with pytest.raises(ManifestError, match="is not that of a store"):
        VectorStore.open(copy, model)


def test_a_store_of_other_prompts_is_refused(root: Path, tmp_path: Path) -> None:
    record = json.loads((root / "store" / "store.json").read_text())
    copy = Path(shutil.copytree(root / "store", tmp_path / "copy"))
    (copy / "store.json").write_text(json.dumps({**record, "prompts": "0" * 64}))
    model = TextEncoder.load(root / "qwen3-bundle")
    with model, pytest.raises(InputError, match="has vectors of another way to read texts"):
        VectorStore.open(copy, model)
