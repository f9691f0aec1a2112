"""The routes of retrieval models give what the models give in Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planforge.exporter import export
from planforge.runtime import TextEncoder

from ....helpers.retrieval_folders import write_folder
from ....helpers.serving import Address, running_server

KINDS = ("qwen3", "router", "colbert", "logit-reranker", "bge-m3")
TEXTS = ["the cat sat on the mat .", "a dog ran away from the cat !", "he saw her"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TextEncoder]]:
    root: Path = tmp_path_factory.mktemp("served")
    opened = {}
    for kind in KINDS:
        export(write_folder(kind, root / kind), root / f"{kind}-B", target=["cpu"], precision=["fp32"])
        opened[kind] = TextEncoder.load(root / f"{kind}-B")
    yield opened
    for model in opened.values():
        model.close()


@pytest.fixture(scope="module")
def address(models: dict[str, Any]) -> Iterator[Address]:
    with running_server(models) as opened:
        yield opened


def test_what_each_model_can_do(address: Address) -> None:
    entries = address.client.get("/v1/models").json()["data"]
    able = {entry["id"]: entry["capabilities"] for entry in entries}
    assert able == {
        "qwen3": ["embeddings"],
        "router": ["embed_sparse", "matches"],
        "colbert": ["matches"],
        "logit-reranker": ["embeddings", "classify", "rerank"],
        "bge-m3": ["embeddings", "embed_sparse", "matches"],
    }
    kinds = {entry["id"]: entry["matches"] for entry in entries if "matches" in entry}
    assert kinds == {"router": ["sparse"], "colbert": ["multi"], "bge-m3": ["sparse", "multi"]}


def test_embeddings_of_queries(address: Address, models: dict[str, TextEncoder]) -> None:
    input_type: Any
    for input_type in (None, "query", "document"):
        given = {} if input_type is None else {"input_type": input_type}
        answer = address.ask("/v1/embeddings", model="qwen3", input=TEXTS, **given)
        wanted = models["qwen3"].embed(TEXTS, input_type=input_type)
        found = np.array([entry["embedding"] for entry in answer["data"]], np.float32)
        assert np.abs(found - wanted).max() < 1e-5
    refused = address.post("/v1/embeddings", model="qwen3", input="a", input_type="passage")
    assert refused.status_code == 400


def test_sparse_weights_as_tei_gives_them(address: Address, models: dict[str, TextEncoder]) -> None:
    input_type: Any
    for kind, input_type in (("router", "query"), ("router", "document"), ("bge-m3", None)):
        given = {} if input_type is None else {"input_type": input_type}
        answer: Any = address.ask("/embed_sparse", model=kind, inputs=TEXTS, **given)
        wanted = models[kind].embed_sparse(TEXTS, input_type=input_type)
        for row, one in zip(answer, wanted, strict=True):
            assert [entry["index"] for entry in row] == one.indices.tolist()
            assert np.allclose([entry["value"] for entry in row], one.values, atol=1e-5)
    few: Any = address.ask("/embed_sparse", model="bge-m3", inputs=TEXTS[0], max_active_dims=2)
    assert [len(row) for row in few] == [2]
    refused = address.post("/embed_sparse", model="qwen3", inputs=TEXTS)
    assert refused.status_code == 400 and "embed_sparse" in refused.text


@pytest.mark.parametrize(
    ("name", "kind", "given"),
    [
        ("router", "sparse", {}),
        ("colbert", "multi", {}),
        ("bge-m3", "sparse", {}),
        ("bge-m3", "multi", {"kind": "multi"}),
    ],
)
def test_matches(
    name: str, kind: str, given: dict[str, str], address: Address, models: dict[str, TextEncoder]
) -> None:
    model = models[name]
    embed = model.embed_sparse if kind == "sparse" else model.embed_multi
    query: Any = embed("cat who ran", input_type="query")
    documents: Any = embed(TEXTS, input_type="document")
    answer = address.ask("/v1/matches", model=name, query="cat who ran", documents=TEXTS, **given)
    scores = model.similarity([query], documents)[0].tolist()
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(scores, abs=1e-5)
    for entry, document in zip(answer["data"], documents, strict=True):
        wanted = model.matches(query, document)
        assert [(one["query"], one["document"]) for one in entry["matches"]] == [
            (one.query, one.document) for one in wanted
        ]
        products = [one["product"] for one in entry["matches"]]
        assert products == pytest.approx([one.product for one in wanted], abs=1e-5)
        assert sum(products) == pytest.approx(entry["score"], abs=1e-4) and entry["dropped"] == 0
    assert any(entry["matches"] for entry in answer["data"])
    assert answer["usage"]["prompt_tokens"] > 10


def test_matches_that_cannot_be_are_refused(address: Address) -> None:
    long = "the cat " * 100
    asked: dict[str, Any]
    for asked, param, words in (
        ({"model": "router", "kind": "multi"}, "kind", "kind must be 'sparse' with this model, not 'multi'"),
        ({"model": "qwen3"}, "model", "does not support 'matches'"),
        ({"model": "colbert", "query": long}, "query", "query[0]"),
        ({"model": "colbert", "documents": ["a", long]}, "documents", "documents[1]"),
        ({"model": "colbert", "documents": []}, "documents", "at least 1"),
        ({"model": "colbert", "truncation": "windows"}, "truncation", "leave out windows"),
    ):
        refused = address.post("/v1/matches", **{"query": "cat", "documents": ["a"], **asked})
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == param and words in error["message"], error
    cut = address.ask(
        "/v1/matches", model="colbert", query=long, documents=["cat", long], truncate_prompt_tokens=-1
    )
    few, many = cut["data"]
    assert len(few["matches"]) == 8 and 0 < few["dropped"] < many["dropped"]


def test_ranks_as_tei_and_vllm_give_them(address: Address, models: dict[str, TextEncoder]) -> None:
    wanted = models["logit-reranker"].rank("cat", TEXTS)
    answer: Any = address.ask("/rerank", query="cat", texts=TEXTS, return_text=True)
    assert [row["index"] for row in answer] == [one.index for one in wanted]
    assert [row["score"] for row in answer] == pytest.approx([one.score for one in wanted], abs=1e-5)
    assert [row["text"] for row in answer] == [one.text for one in wanted]
    scores = {one.index: one.score for one in wanted}
    entries = address.ask("/v1/score", text_1="cat", text_2=TEXTS)["data"]
    assert [entry["score"] for entry in entries] == pytest.approx([scores[0], scores[1], scores[2]], abs=1e-5)
    assert {entry["object"] for entry in entries} == {"score"}
    told = [one.score for one in models["logit-reranker"].rank("cat", TEXTS[:1], prompt="he saw")]
    assert told[0] != pytest.approx(scores[0], abs=1e-4)
    (entry,) = address.ask("/v1/score", text_1="cat", text_2=TEXTS[:1], prompt="he saw")["data"]
    assert entry["score"] == pytest.approx(told[0], abs=1e-5)
    (row,) = address.ask("/rerank", query="cat", texts=TEXTS[:1], prompt="he saw")
    assert row["score"] == pytest.approx(told[0], abs=1e-5)
    refused = address.post("/v1/score", text_1=["a", "b"], text_2=TEXTS)
    assert refused.status_code == 400 and "text_1 has 2 texts and text_2 3" in refused.text


def test_long_texts_are_refused_unless_they_may_be_cut(address: Address) -> None:
    long = "the cat " * 100
    assert address.post("/embed_sparse", model="bge-m3", inputs=long).status_code == 400
    assert address.post("/embed_sparse", model="bge-m3", inputs=long, truncate=True).status_code == 200
    assert address.post("/rerank", query="cat", texts=[long]).status_code == 400
    assert address.post("/rerank", query="cat", texts=[long], truncate=True).status_code == 200
