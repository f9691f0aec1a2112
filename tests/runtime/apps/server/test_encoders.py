"""The routes of encoders and translators give what the models give in Python."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import CrossEncoder, SentenceTransformer

from planforge.runtime import TextGenerator, Translator

from ....helpers.results import assert_equal
from ....helpers.serving import Address

TEXTS = ["Wings lift the plane.", "The baker sells bread.", "Birds can fly.", "a " * 700]


def read_vectors(answer: dict[str, Any]) -> np.ndarray[Any, Any]:
    rows = []
    for entry in answer["data"]:
        vector = entry["embedding"]
        if isinstance(vector, str):
            vector = np.frombuffer(base64.b64decode(vector), "<f4")
        rows.append(np.asarray(vector, np.float32))
    return np.stack(rows)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings_are_sentence_transformers(
    server: Address, sentence_model: SentenceTransformer, form: str
) -> None:
    answer = server.ask(
        "/v1/embeddings", model="minilm", input=TEXTS, encoding_format=form, truncation="head"
    )
    expected = sentence_model.encode(TEXTS)
    assert np.abs(read_vectors(answer) - expected).max() < 1e-5
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3]
    read = int(sentence_model.tokenize(TEXTS)["attention_mask"].sum())  # after truncation
    assert answer["object"] == "list" and answer["usage"] == {"prompt_tokens": read, "total_tokens": read}


def test_texts_that_are_read_in_several_steps(server: Address, models: dict[str, Any]) -> None:
    texts = [f"{word} " + "a " * 26_000 for word in ("wings", "bread", "birds")]
    answer = server.ask("/v1/embeddings", model="minilm", input=texts, truncation="head")
    np.testing.assert_allclose(read_vectors(answer), models["minilm"].embed(texts), atol=1e-6)
    refused = server.post("/v1/fill-mask", model="pretrained", input=[f"[MASK] {texts[0]}", texts[1]])
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith("input[1]: ")


@pytest.mark.parametrize("most", [-1, 16])
def test_a_long_text_is_cut_where_the_client_asks_for_it(
    server: Address, sentence_model: SentenceTransformer, most: int
) -> None:
    """So many tokens, as sentence-transformers keeps with this max_seq_length; refused unless asked for."""
    text = "the baker sells bread " * 1000
    refused = server.post("/v1/embeddings", model="minilm", input=["a", text])
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"].startswith("input")
    assert "truncation" in error["message"] and error["message"].startswith("input[1]: ")
    answer = server.ask("/v1/embeddings", model="minilm", input=["a", text], truncate_prompt_tokens=most)
    usual = sentence_model.max_seq_length
    assert usual is not None
    everything = len(sentence_model.tokenizer(text, truncation=False)["input_ids"])
    try:
        if most > 0:
            sentence_model.max_seq_length = most
        expected = sentence_model.encode(["a", text])
        kept = most if most > 0 else usual
    finally:
        sentence_model.max_seq_length = usual
    assert np.abs(read_vectors(answer) - expected).max() < 1e-5
    assert [entry["dropped"] for entry in answer["data"]] == [0, everything - kept]


def test_no_route_of_an_encoder_drops_text_unasked(server: Address) -> None:
    long = "the baker sells bread " * 1000
    for path, model, body in (
        ("/v1/rerank", "ranker", {"query": "bread", "documents": ["a", long]}),
        ("/v1/classify", "classifier", {"input": long}),
    ):
        refused = server.post(path, model=model, **body)
        assert refused.status_code == 400, path
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        answer = server.ask(path, model=model, **body, truncate_prompt_tokens=-1)
        assert max(entry["dropped"] for entry in answer.get("data", answer.get("results"))) > 4000
    for path, model, body in (  # read in windows, all of it
        ("/v1/tags", "tagger", {"input": long}),
        ("/v1/answers", "reader", {"question": "Who?", "context": long}),
        ("/v1/fill-mask", "pretrained", {"input": f"[MASK] {long}"}),
    ):
        assert server.ask(path, model=model, **body)["data"][0]["dropped"] == 0, path


def test_more_text_than_is_ever_read(server: Address) -> None:
    for path, model, body, status, param in (
        ("/v1/embeddings", "minilm", {"input": ["a", "a " * 150_000], "truncation": "head"}, 400, "input"),
        ("/v1/classify", "classifier", {"input": [["a", "a " * 150_000]]}, 400, "input"),
        ("/v1/answers", "reader", {"question": "Who?", "context": "a " * 150_000}, 400, "context"),
        ("/v1/translations", "dates", {"input": "a" * 70_000, "truncation": "head"}, 400, "input"),
        ("/tokenize", "gpt", {"content": "a " * 40_000}, 400, "content"),
        ("/v1/rerank", "ranker", {"query": "a " * 100_000, "documents": ["b"] * 2000}, 413, "query"),
    ):
        refused = server.post(path, model=model, **body)
        assert refused.status_code == status, path
        error = refused.json()["error"]
        assert error["param"] == param
        assert error["code"] == ("too_large" if status == 413 else "context_length_exceeded")


def test_dimensions_shorten_and_normalize(server: Address, models: dict[str, Any]) -> None:
    answer = server.ask("/v1/embeddings", model="minilm", input=TEXTS[0], dimensions=64)
    expected = models["minilm"].embed(TEXTS[:1], truncate_dim=64)
    np.testing.assert_allclose(read_vectors(answer), expected, atol=1e-6)


def test_ranks_are_sentence_transformers(server: Address, head_bundle: Callable[[str], Path]) -> None:
    checkpoint = head_bundle("ranker").with_name("ranker")
    query = "the world?"
    documents = ["hello world, not it!", "Paris is it", "我在北京 café", "the plan is it. " * 30, "the"]
    expected = CrossEncoder(str(checkpoint), device="cpu").rank(query, documents, show_progress_bar=False)
    assert np.ptp([row["score"] for row in expected]) > 0.05
    body: dict[str, Any] = {"model": "ranker", "query": query, "documents": documents, "truncation": "head"}
    results = server.ask("/v1/rerank", **body, return_documents=True)["results"]
    assert [row["index"] for row in results] == [row["corpus_id"] for row in expected]
    scores = [row["relevance_score"] for row in results]
    assert scores == pytest.approx([row["score"] for row in expected], abs=1e-5)
    assert [row["document"]["text"] for row in results] == [documents[row["index"]] for row in results]
    (best,) = server.ask("/v1/rerank", **{**body, "documents": [{"text": t} for t in documents]}, top_n=1)[
        "results"
    ]
    assert best["index"] == results[0]["index"] and "document" not in best
    assert best["relevance_score"] == pytest.approx(scores[0], abs=1e-6)


def test_classes_tags_answers_and_masks(server: Address, models: dict[str, Any]) -> None:
    for path, model, body, expected in (
        ("classify", "classifier", {"input": TEXTS[:2]}, lambda m: m.classify(TEXTS[:2])),
        ("classify", "classifier", {"input": [TEXTS[:2]]}, lambda m: [m.classify(TEXTS[0], TEXTS[1])]),
        ("tags", "tagger", {"input": TEXTS[0]}, lambda m: [m.tag(TEXTS[0])]),
        (
            "answers",
            "reader",
            {"question": "Who?", "context": TEXTS[:2], "n_best": 2},
            lambda m: m.answer([("Who?", text) for text in TEXTS[:2]], n_best=2),
        ),
        (
            "fill-mask",
            "pretrained",
            {"input": "a [MASK] b", "top_k": 3},
            lambda m: [m.fill_mask("a [MASK] b", top_k=3)],
        ),
    ):
        data = server.ask(f"/v1/{path}", model=model, **body)["data"]
        results = expected(models[model])
        assert len(data) == len(results)
        for index, (entry, result) in enumerate(zip(data, results, strict=True)):
            assert entry.pop("index") == index
            entry.pop("best", None)
            assert_equal(entry, json.loads(json.dumps(result.to_json())))


def test_translations(server: Address, models: dict[str, Any]) -> None:
    translator = models["dates"]
    assert isinstance(translator, Translator)
    texts = ["the 3rd of May, 1998", "July 9 2007"]
    answer = server.ask("/v1/translations", model="dates", input=texts, num_beams=3, n_best=2)
    expected = translator.translate(texts, num_beams=3, n_best=2)
    for entry, result in zip(answer["data"], expected, strict=True):
        assert entry["text"] == result.text
        assert entry["score"] == pytest.approx(result.score, abs=1e-5)
        assert [one["text"] for one in entry["candidates"]] == [one.text for one in result.candidates]
        assert entry["finish_reason"] == "stop"


def test_a_translations_alignment(server: Address, models: dict[str, Any]) -> None:
    (entry,) = server.ask("/v1/translations", input="the 3rd of May, 1998", alignment=True)["data"]
    expected = models["dates"].align("the 3rd of May, 1998")
    alignment = entry["alignment"]
    assert tuple(alignment["source"]) == expected.source and tuple(alignment["target"]) == expected.target
    np.testing.assert_allclose(alignment["weights"], expected.averaged(), atol=1e-4)


def test_tokens_and_back(server: Address, gpt: TextGenerator, models: dict[str, Any]) -> None:
    for name in ("gpt", "minilm", "dates"):
        answer = server.ask("/tokenize", model=name, content="the 3rd of May")
        model = models[name]
        tokenizer = model.source_tokenizer if isinstance(model, Translator) else model.tokenizer
        assert answer["tokens"] == tokenizer.encode("the 3rd of May")
        assert answer["count"] == len(answer["tokens"])
    content = server.ask("/detokenize", model="gpt", tokens=gpt.tokenizer.encode("In the beginning"))[
        "content"
    ]
    assert content == "In the beginning"
    assert server.post("/detokenize", model="gpt", tokens=[10**9]).status_code == 400


def test_the_models_say_what_they_can_do(server: Address, models: dict[str, Any]) -> None:
    entries = {entry["id"]: entry for entry in server.client.get("/v1/models").json()["data"]}
    assert list(entries) == list(models)
    able = {name: set(entry["capabilities"]) for name, entry in entries.items()}
    assert able["gpt"] == {"completions"} and able["llama"] == {"chat", "completions"}
    assert able["minilm"] == {"embeddings"} and able["dates"] == {"translations"}
    assert {"classify", "embeddings"} <= able["classifier"] and "rerank" not in able["classifier"]
    assert {"rerank"} <= able["ranker"]
    assert "tags" in able["tagger"] and "answers" in able["reader"] and "fill-mask" in able["pretrained"]
    assert entries["dates"]["alignments"] is True
    assert entries["pretrained"]["mask_token"] == "[MASK]"
    assert entries["gpt"]["context_length"] == models["gpt"].max_length
    assert server.client.get("/v1/models/gpt").json() == entries["gpt"]


@pytest.fixture(scope="module")
def sentence_model() -> SentenceTransformer:
    from planforge.exporter.checkpoints.source import resolve_source

    return SentenceTransformer(str(resolve_source("bert-demo").folder), device="cpu")
