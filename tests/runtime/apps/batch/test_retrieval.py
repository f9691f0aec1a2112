"""Batches of sparse weights and of tokens' vectors, against sentence-transformers 6.

V vocabulary
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.util.quantization import quantize_embeddings

from planforge.runtime import TextEncoder
from planforge.runtime.apps.batch import BatchWorker, run_batch
from planforge.runtime.errors import InputError

from ....helpers.cli import planforge
from ....helpers.retrieval_folders import WORDS

Kind = Callable[[str], Path]
TEXTS = [
    "the cat sat on the mat .",
    "a dog ran away from the cat !",
    "he saw her",
    "zebra",
    "they walked home",
]
NEAR = 1e-5


def answer(bundle: Path, task: str, **options: Any) -> pa.Table:
    """What a worker makes of the texts."""
    worker = BatchWorker(bundle, task, options=options)
    answers = worker.answer({"text": TEXTS})
    worker.close()
    assert answers["error"].null_count == len(TEXTS)
    return answers


def densify(rows: list[dict[str, Any]]) -> Any:
    """Return weights (N, V)."""
    dense = np.zeros((len(rows), len(WORDS)), np.float32)
    for row, one in zip(dense, rows, strict=True):
        row[one["indices"]] = one["values"]
        assert list(one["tokens"]) == [WORDS[index] for index in one["indices"]]
    return dense


def test_weights_of_documents_and_of_queries(retrieval_bundle: Kind) -> None:
    bundle = retrieval_bundle("router")
    theirs = SparseEncoder(str(bundle.parent / "checkpoint"), device="cpu")
    for encode, input_type in ((theirs.encode_document, "document"), (theirs.encode_query, "query")):
        rows = answer(bundle, "embed_sparse", input_type=input_type)["sparse"].to_pylist()
        np.testing.assert_allclose(densify(rows), encode(TEXTS).to_dense().numpy(), atol=NEAR)
    few = answer(bundle, "embed_sparse", max_active_dims=3)["sparse"].to_pylist()
    wanted = theirs.encode_document(TEXTS, max_active_dims=3).to_dense().numpy()
    np.testing.assert_allclose(densify(few), wanted, atol=NEAR)


@pytest.mark.parametrize("input_type", ["document", "query"])
def test_vectors_of_tokens(retrieval_bundle: Kind, input_type: str) -> None:
    bundle = retrieval_bundle("colbert")
    theirs = MultiVectorEncoder(str(bundle.parent / "checkpoint"), device="cpu")
    encode = theirs.encode_query if input_type == "query" else theirs.encode_document
    rows = answer(bundle, "embed_multi", input_type=input_type)["multi"].to_pylist()
    for row, vectors in zip(rows, encode(TEXTS), strict=True):
        np.testing.assert_allclose(np.float32(row["vectors"]), np.asarray(vectors), atol=NEAR)
        assert len(row["tokens"]) == len(row["vectors"])


def test_all_three_of_one_pass(retrieval_bundle: Kind) -> None:
    bundle = retrieval_bundle("bge-m3")
    rows = answer(bundle, "embed_hybrid").to_pylist()
    dense = SentenceTransformer(str(bundle.parent / "checkpoint"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(np.array([row["embedding"] for row in rows]), dense, atol=NEAR)
    with TextEncoder.load(bundle) as model:
        for row, sparse, multi in zip(rows, model.embed_sparse(TEXTS), model.embed_multi(TEXTS), strict=True):
            np.testing.assert_allclose(densify([row["sparse"]]), densify([sparse.to_json()]), atol=NEAR)
            np.testing.assert_allclose(np.float32(row["multi"]["vectors"]), multi.vectors, atol=NEAR)
            assert row["multi"]["tokens"] == list(multi.tokens)


@pytest.mark.parametrize(
    ("precision", "number"),
    [("int8", pa.int8()), ("uint8", pa.uint8()), ("binary", pa.int8()), ("ubinary", pa.uint8())],
)
def test_vectors_in_fewer_bytes(retrieval_bundle: Kind, precision: Any, number: pa.DataType) -> None:
    bundle = retrieval_bundle("qwen3")
    answers = answer(bundle, "embed", precision=precision)
    with TextEncoder.load(bundle) as model:
        ranges = np.array(model.defaults.roles.ranges, np.float32)
        wanted = quantize_embeddings(model.embed(TEXTS), precision, ranges=ranges)
    assert answers.schema.field("embedding").type == pa.list_(number)
    assert answers["embedding"].to_pylist() == np.asarray(wanted).tolist()


def test_a_job_of_weights_goes_on_where_it_was_interrupted(splade_bundle: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, None]) + "{")
    job: dict[str, Any] = {"options": {"min_weight": 0.1}, "workers": 1}
    first = run_batch(splade_bundle, "embed_sparse", source, tmp_path / "out", rows_per_part=2, **job)
    assert (first.rows, first.errors, first.parts) == (7, 2, 4)
    before = pq.read_table(tmp_path / "out")
    assert before["sparse"].is_null().to_pylist() == [False] * 5 + [True] * 2
    theirs = SparseEncoder(str(splade_bundle.parent / "checkpoint"), device="cpu")
    wanted = theirs.encode(TEXTS).to_dense().numpy()
    found = densify(before["sparse"].to_pylist()[:5])
    np.testing.assert_allclose(found, np.where(wanted > 0.1, wanted, 0), atol=NEAR)
    (tmp_path / "out" / "part-000001.parquet").unlink()
    assert run_batch(splade_bundle, "embed_sparse", source, tmp_path / "out", **job).computed == 2
    assert pq.read_table(tmp_path / "out").equals(before)
    with pytest.raises(InputError, match="has parts of a job with another --option"):
        run_batch(splade_bundle, "embed_sparse", source, tmp_path / "out", workers=1)


def test_the_command_takes_options_of_a_task(retrieval_bundle: Kind, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    bundle = retrieval_bundle("router")
    command: list[str | Path] = ["batch", bundle, "--task", "embed_sparse"]
    command += ["--input", tmp_path / "in.txt", "-o"]
    done = planforge(*command, tmp_path / "out", "--option=input_type=query", "--option=max_active_dims=2")
    assert done.returncode == 0, done.stderr
    found = pq.read_table(tmp_path / "out")["sparse"].to_pylist()
    theirs = SparseEncoder(str(bundle.parent / "checkpoint"), device="cpu")
    wanted = theirs.encode_query(TEXTS, max_active_dims=2).to_dense().numpy()
    np.testing.assert_allclose(densify(found), wanted, atol=NEAR)
    done = planforge(*command, tmp_path / "other", "--option=input_type=passage")
    assert done.returncode == 1 and "input_type='passage' is not one of" in done.stderr


def test_a_model_of_another_kind_is_refused(splade_bundle: Path) -> None:
    with pytest.raises(InputError, match="embed_multi needs a model of late interaction"):
        BatchWorker(splade_bundle, "embed_multi")
    with pytest.raises(InputError, match="option='max_active_dims' is not one of"):
        BatchWorker(splade_bundle, "embed_multi", options={"max_active_dims": 2})
