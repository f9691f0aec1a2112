"""Bundles of retrieval models against sentence-transformers 6, and against BGE-M3's formulas.

V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.util.quantization import quantize_embeddings

from planforge.exporter import export
from planforge.runtime import TextEncoder
from planforge.runtime.encode.results import Match, MultiVector, SparseEmbedding
from planforge.runtime.encode.similarity import match_multi, match_sparse
from planforge.runtime.errors import InputError

from ...helpers.retrieval_folders import (
    WORDS,
    WRITERS,
    write_folder,
    write_logit_reranker,
    write_pooled_reranker,
)

TEXTS = [
    "the cat sat on the mat .",
    "a dog ran away from the cat ! they walked home , and then they slept in the sun .",
    "he saw her",
    "zebra",
    "",
]
QUERIES = ["cat", "who ran away from the dog ? the cat , a dog , no cat , a dog and a dog"]
NEAR = 1e-5  # of vectors and weights, absolute, as the project asks
NEAR_SCORE = 1e-4  # of sums of up to 32 products


class Folders:
    """Folders of each kind and their bundles, made when they are asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, kind: str) -> Path:
        folder = self.root / kind
        return folder if folder.exists() else write_folder(kind, folder)

    def load(self, kind: str) -> TextEncoder:
        bundle = self.root / "bundles" / kind
        if not bundle.exists():
            report = export(self.write(kind), bundle, target=["cpu"], precision=["fp32"]).report
            assert report is not None and report.passed and report.with_pytorch
        return TextEncoder.load(bundle)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("retrieval"))


@pytest.fixture
def load(folders: Folders) -> Iterator[Callable[[str], TextEncoder]]:
    opened: list[TextEncoder] = []

    def load_once(kind: str) -> TextEncoder:
        opened.append(folders.load(kind))
        return opened[-1]

    yield load_once
    for model in opened:
        model.close()


def densify(embeddings: list[SparseEmbedding]) -> Any:
    """Return weights (N, V)."""
    dense = np.zeros((len(embeddings), len(WORDS)), np.float32)
    for row, one in zip(dense, embeddings, strict=True):
        row[one.indices] = one.values
        assert one.tokens == tuple(WORDS[index] for index in one.indices)
        assert (np.diff(one.indices) > 0).all() and (one.values > 0).all()
    return dense


def largest_difference(got: Any, want: Any) -> float:
    got, want = (np.asarray(one) for one in (got, want))
    assert got.shape == want.shape
    return float(np.abs(got - want).max())


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3", "static", "model2vec", "two-encoders"])
def test_dense_vectors(kind: str, folders: Folders, load: Callable[[str], TextEncoder]) -> None:
    model = load(kind)
    theirs = SentenceTransformer(str(folders.write(kind)), device="cpu")
    assert largest_difference(model.embed(TEXTS), theirs.encode(TEXTS)) < NEAR
    queries = model.embed(QUERIES, input_type="query")
    documents = model.embed(TEXTS, input_type="document")
    assert largest_difference(queries, theirs.encode_query(QUERIES)) < NEAR
    assert largest_difference(documents, theirs.encode_document(TEXTS)) < NEAR
    wanted = theirs.similarity(theirs.encode_query(QUERIES), theirs.encode_document(TEXTS))
    assert largest_difference(model.similarity(queries, documents), wanted) < NEAR_SCORE
    assert model.tasks == ("embed", "features")


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_vectors_in_fewer_bytes(precision: Any, load: Callable[[str], TextEncoder]) -> None:
    model = load("qwen3")
    vectors = model.embed(TEXTS)
    ranges = np.array(model.defaults.roles.ranges, np.float32)
    assert ranges.shape == (2, 32) and (ranges[0] < ranges[1]).all()
    wanted = np.asarray(quantize_embeddings(vectors, precision, ranges=ranges))
    found = model.embed(TEXTS, precision=precision)
    assert found.dtype == wanted.dtype and found.tolist() == wanted.tolist()
    if "int" in precision:
        with pytest.raises(InputError, match="they are those of whole vectors: leave out truncate_dim"):
            model.embed(TEXTS, precision=precision, truncate_dim=8)
    with pytest.raises(InputError, match="precision='int4' is not one of"):
        model.embed("a", precision="int4")  # type: ignore[arg-type]


def test_prompts_and_routes_change_vectors(load: Callable[[str], TextEncoder]) -> None:
    for kind in ("qwen3", "two-encoders"):
        model = load(kind)
        as_query, as_document = (model.embed(TEXTS[0], input_type=name) for name in ("query", "document"))
        assert np.abs(as_query - as_document).max() > 0.01
    model = load("qwen3")
    assert np.array_equal(model.embed("cat", input_type="query"), model.embed("cat", prompt_name="query"))


@pytest.mark.parametrize(("pooling", "activation"), [("max", "relu"), ("max", "log1p_relu"), ("sum", "relu")])
def test_splade(pooling: str, activation: str, folders: Folders, tmp_path: Path) -> None:
    torch.manual_seed(1)
    from ...helpers.retrieval_folders import write_splade

    write_splade(tmp_path / "splade", pooling, activation)
    export(tmp_path / "splade", tmp_path / "B", target=["cpu"], precision=["fp32"])
    theirs = SparseEncoder(str(tmp_path / "splade"), device="cpu")
    wanted = theirs.encode(TEXTS).to_dense().numpy()
    with TextEncoder.load(tmp_path / "B") as model:
        assert model.tasks == ("embed_sparse", "features")
        found = model.embed_sparse(TEXTS)
        near = NEAR * max(1.0, float(wanted.max()))  # a sum of weights has more to round
        assert largest_difference(densify(found), wanted) < near
        queries = model.embed_sparse(QUERIES)
        theirs_of_queries = theirs.encode(QUERIES)
        scores = theirs.similarity(theirs_of_queries, theirs.encode(TEXTS))
        assert largest_difference(model.similarity(queries, found), scores) < NEAR_SCORE * float(
            scores.abs().max()
        )
        few = theirs.encode(TEXTS, max_active_dims=5).to_dense().numpy()
        assert largest_difference(densify(model.embed_sparse(TEXTS, max_active_dims=5)), few) < near
        alone = model.embed_sparse(TEXTS[0])
        (above,) = model.embed_sparse(TEXTS[:1], min_weight=1.0)
        assert above.values.tolist() == [value for value in alone.values.tolist() if value > 1]
        (submitted,) = model.submit("embed_sparse", TEXTS[:1]).result()
        assert np.array_equal(submitted.values, alone.values)
        with pytest.raises(InputError, match="embed_multi needs a model of late interaction"):
            model.embed_multi("a")
        with pytest.raises(InputError, match="embed needs pooling here"):
            model.embed("a")


def test_queries_without_inference(folders: Folders, load: Callable[[str], TextEncoder]) -> None:
    model = load("router")
    theirs = SparseEncoder(str(folders.write("router")), device="cpu")
    documents = model.embed_sparse(TEXTS, input_type="document")
    queries = model.embed_sparse([*QUERIES, "", "zebra"], input_type="query")
    wanted = theirs.encode_query([*QUERIES, "", "zebra"]).to_dense().numpy()
    assert largest_difference(densify(documents), theirs.encode_document(TEXTS).to_dense().numpy()) < NEAR
    assert largest_difference(densify(queries), wanted) < NEAR
    assert densify(model.embed_sparse(TEXTS)).tolist() == densify(documents).tolist()
    scores = theirs.similarity(torch.from_numpy(wanted), theirs.encode_document(TEXTS).to_dense())
    assert largest_difference(model.similarity(queries, documents), scores) < NEAR_SCORE


@pytest.mark.parametrize("kind", ["colbert", "stanford", "pylate", "expanded", "attended"])
def test_late_interaction(
    kind: str, folders: Folders, load: Callable[[str], TextEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ...helpers.retrieval_folders import write_colbert

    for name, attend in (("expanded", False), ("attended", True)):
        expansion = {"strategy": "min", "attend": attend, "token": "mat", "length": 9}
        monkeypatch.setitem(WRITERS, name, partial(write_colbert, expansion=expansion))
    model = load(kind)
    theirs = MultiVectorEncoder(str(folders.write(kind)), device="cpu")
    assert model.tasks == ("embed_multi", "features")
    queries = model.embed_multi(QUERIES, input_type="query")
    documents = model.embed_multi(TEXTS, input_type="document")
    wanted = [*theirs.encode_query(QUERIES), *theirs.encode_document(TEXTS)]
    for own, vectors in zip([*queries, *documents], wanted, strict=True):
        assert largest_difference(own.vectors, vectors) < NEAR
        assert len(own.tokens) == len(own.vectors)
    scores = theirs.similarity(theirs.encode_query(QUERIES), theirs.encode_document(TEXTS))
    assert largest_difference(model.similarity(queries, documents), scores) < NEAR_SCORE
    assert model.maxsim(queries[0], documents[1]) == pytest.approx(float(scores[0, 1]), abs=NEAR_SCORE)


@pytest.mark.parametrize("kind", ["splade", "router"])
def test_words_that_match(kind: str, folders: Folders, load: Callable[[str], TextEncoder]) -> None:
    model = load(kind)
    theirs = SparseEncoder(str(folders.write(kind)), device="cpu")
    queries = model.embed_sparse(QUERIES, input_type="query")
    documents = model.embed_sparse(TEXTS, input_type="document")
    scores = model.similarity(queries, documents)
    their_queries, their_documents = theirs.encode_query(QUERIES), theirs.encode_document(TEXTS)
    for own, row, query in zip(queries, scores, their_queries.to_dense(), strict=True):
        wanted: Any = theirs.decode(query * their_documents.to_dense())
        for document, score, pairs in zip(documents, row, wanted, strict=True):
            found = model.matches(own, document)
            assert {one.query: one.product for one in found} == pytest.approx(dict(pairs), abs=NEAR_SCORE)
            assert [one.query for one in found] == [one.document for one in found]
            products = [one.product for one in found]
            assert products == sorted(products, reverse=True)
            assert sum(products) == pytest.approx(float(score), abs=NEAR_SCORE)
    assert sum(len(model.matches(queries[1], document)) for document in documents) > 5


@pytest.mark.parametrize("kind", ["colbert", "stanford", "bge-m3"])
def test_tokens_that_match(kind: str, folders: Folders, load: Callable[[str], TextEncoder]) -> None:
    model = load(kind)
    queries = model.embed_multi(QUERIES, input_type="query")
    documents = model.embed_multi(TEXTS, input_type="document")
    vectors = [one.vectors for one in (*queries, *documents)]
    if kind != "bge-m3":  # whose vectors are compared with its formulas below
        theirs = MultiVectorEncoder(str(folders.write(kind)), device="cpu")
        vectors = [np.asarray(one) for one in (*theirs.encode_query(QUERIES), *theirs.encode_document(TEXTS))]
    scores = model.similarity(queries, documents)
    for own, row, query in zip(queries, scores, vectors, strict=False):
        for document, score, other in zip(documents, row, vectors[len(queries) :], strict=True):
            found = model.matches(own, document)
            products = np.array([[float(a @ b) for b in other] for a in query])
            assert [one.query for one in found] == list(own.tokens)
            assert largest_difference([one.product for one in found], products.max(1)) < NEAR
            assert [one.document for one in found] == [document.tokens[best] for best in products.argmax(1)]
            assert sum(one.product for one in found) == pytest.approx(float(score), abs=NEAR_SCORE)
    if kind == "colbert":
        assert queries[0].tokens == ("[CLS]", "cat", "[SEP]")
        assert documents[0].tokens == ("[CLS]", *TEXTS[0].removesuffix(" .").split(), "[SEP]")


def test_matches_sum_to_each_function() -> None:
    words = SparseEmbedding(np.array([1, 3, 7]), np.array([1, 2, 2], np.float32), ("a", "b", "c"))
    others = SparseEmbedding(np.array([3, 4, 7]), np.array([1, 2, 2], np.float32), ("b", "x", "c"))
    assert match_sparse(words, others, "dot") == [Match("c", "c", 4.0), Match("b", "b", 2.0)]
    assert [one.product for one in match_sparse(words, others, "cosine")] == pytest.approx([4 / 9, 2 / 9])
    none = SparseEmbedding(np.zeros(0, np.int64), np.zeros(0, np.float32), ())
    for function in ("dot", "cosine"):
        assert match_sparse(words, none, function) == match_sparse(none, none, function) == []
    two = MultiVector(np.array([[1, 0], [0, -1]], np.float32), ("a", "b"))
    three = MultiVector(np.array([[0, 2], [3, 1], [3, 1]], np.float32), ("x", "y", "z"))
    assert match_multi(two, three, "maxsim") == [Match("a", "y", 3.0), Match("b", "y", -1.0)]
    assert match_multi(two, three, "meanmaxsim") == [Match("a", "y", 1.5), Match("b", "y", -0.5)]
    empty = MultiVector(np.zeros((0, 2), np.float32), ())
    assert match_multi(two, empty, "maxsim") == match_multi(empty, two, "meanmaxsim") == []


@pytest.mark.parametrize(
    "write",
    [
        write_logit_reranker,
        partial(write_logit_reranker, family="Gemma2", final_logit_softcapping=2.0),
        partial(write_logit_reranker, family="Granite", logits_scaling=3.0),
        write_pooled_reranker,
        partial(write_pooled_reranker, family="Qwen3"),
    ],
    ids=["logits", "capped logits", "scaled logits", "pooled", "pooled decoder"],
)
def test_rerankers_of_modules(write: Callable[[Path], None], tmp_path: Path) -> None:
    torch.manual_seed(2)
    write(tmp_path / "reranker")
    export(tmp_path / "reranker", tmp_path / "B", target=["cpu"], precision=["fp32"])
    theirs = CrossEncoder(str(tmp_path / "reranker"), device="cpu")
    with TextEncoder.load(tmp_path / "B") as model:
        for query in QUERIES:
            wanted = theirs.predict([(query, text) for text in TEXTS])
            found = sorted(model.rank(query, TEXTS), key=lambda one: one.index)
            assert np.ptp(wanted) > 100 * NEAR
            assert largest_difference(np.array([one.score for one in found]), wanted) < NEAR


def test_three_embeddings_in_one_pass(folders: Folders, load: Callable[[str], TextEncoder]) -> None:
    """BGE-M3's paper: section 3.1, and FlagEmbedding's way of leaving out the tokens around a text."""
    folder = folders.write("bge-m3")
    model = load("bge-m3")
    body = transformers.XLMRobertaModel.from_pretrained(folder, add_pooling_layer=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sparse, late = (load_file(folder / f"{name}_linear.safetensors") for name in ("sparse", "colbert"))
    assert model.tasks[:4] == ("embed", "embed_sparse", "embed_multi", "embed_hybrid")
    found = list(model.iterate("embed_hybrid", TEXTS))
    dense = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    for text, one, vector in zip(TEXTS, found, dense, strict=True):
        given = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            (states,) = body(**given).last_hidden_state
        weights = torch.relu(states @ sparse["weight"].T + sparse["bias"])[:, 0]
        wanted = np.zeros((1, len(WORDS)), np.float32)
        for token, weight in zip(given["input_ids"][0].tolist(), weights.tolist(), strict=True):
            if token not in (0, 1, 2, 3):  # padding, unknown words, and what stands around a text
                wanted[0, token] = max(wanted[0, token], weight)
        multi = torch.nn.functional.normalize(states[1:] @ late["weight"].T + late["bias"], dim=-1)
        assert largest_difference(one.vector, vector) < NEAR
        assert largest_difference(densify([one.sparse]), wanted) < NEAR
        assert largest_difference(one.multi.vectors, multi.numpy()) < NEAR
    rows = densify([one.sparse for one in found])
    products = model.similarity([one.sparse for one in found], [one.sparse for one in found])
    assert largest_difference(products, rows @ rows.T) < NEAR  # cosine is the vectors' function
    (alone,) = model.embed_sparse(TEXTS[:1])
    assert np.allclose(alone.values, found[0].sparse.values, atol=NEAR)


def test_options_that_cannot_be_used(load: Callable[[str], TextEncoder]) -> None:
    model = load("bge-m3")
    for options, words in (
        ({"max_active_dims": 0}, "max_active_dims=0 must be"),
        ({"min_weight": -1.0}, "min_weight=-1.0 must be a number of 0 or more"),
        ({"input_type": "passage"}, "input_type='passage' is not one of"),
    ):
        with pytest.raises(InputError, match=words):
            model.embed_sparse("a", **options)
    with pytest.raises(InputError, match="embed_multi reads a text at once"):
        model.embed_multi("a", truncation="windows")
    dense = load("static")
    with pytest.raises(InputError, match=r"embed_sparse needs a model of sparse weights"):
        dense.embed_sparse("a")
    with pytest.raises(InputError, match="must be of one kind"):
        dense.similarity(dense.embed(["a"]), [])
    for precision in ("int8", "ubinary"):
        with pytest.raises(InputError, match=r"vectors in u?int8 have another unit.*faiss"):
            dense.similarity(dense.embed(["a"]), dense.embed(["b"], precision=precision))
    with pytest.raises(InputError, match="both be what embed_sparse gave, or both what embed_multi gave"):
        model.matches(model.embed_sparse("a"), model.embed_multi("a"))
