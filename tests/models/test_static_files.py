"""Tables of tokens' weights in idf.json, as sentence-transformers' SparseStaticEmbedding reads them.

V vocabulary
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

from planforge.exporter import export
from planforge.models.checkpoint import describe
from planforge.models.weights import read_weights
from planforge.runtime import TextEncoder

from ..helpers.retrieval_folders import WORDS, masked_bert, write_body

TEXTS = ["the cat sat on the mat .", "a dog ran away from the cat !", "zebra", ""]
NEAR = 1e-5
IDF = {word: 0.25 + 0.125 * place for place, word in enumerate(WORDS) if place % 3}  # others have none


def make_module(body: Path) -> SparseStaticEmbedding:
    """The module that reads an idf.json, which is written beside a tokenizer."""
    (body / "idf.json").write_text(json.dumps(IDF), encoding="utf-8")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(body)
    module: SparseStaticEmbedding = SparseStaticEmbedding.from_json(
        str(body / "idf.json"), tokenizer, frozen=True
    )
    return module


def write_alone(folder: Path) -> Path:
    """Documents are read as queries are; return the module's folder."""
    module = make_module(write_body(folder.parent / "body", masked_bert()))
    SparseEncoder(modules=[module], device="cpu").save_pretrained(str(folder))
    return next(folder.rglob("model.safetensors")).parent


def write_router(folder: Path) -> Path:
    """Queries are read without inference; return the folder of their module."""
    body = write_body(folder.parent / "body", masked_bert())
    document = [Transformer(str(body), transformer_task="fill-mask"), SpladePooling("max")]
    query: list[Any] = [make_module(body)]
    router = Router.for_query_document(query_modules=query, document_modules=document)
    SparseEncoder(modules=[router], device="cpu").save_pretrained(str(folder))
    return next(folder.glob("query*"))


def name_idf(module: Path, **weights: float) -> None:
    """Put an idf.json in the place of a module's table, as its config.json names it."""
    (module / "model.safetensors").unlink()
    (module / "idf.json").write_text(json.dumps({**IDF, **weights}), encoding="utf-8")
    config = json.loads((module / "config.json").read_text(encoding="utf-8"))
    config["path"] = str(module / "idf.json")
    (module / "config.json").write_text(json.dumps(config), encoding="utf-8")


def densify(model: TextEncoder, texts: list[str], **options: Any) -> Any:
    """Return weights (N, V)."""
    dense = np.zeros((len(texts), len(WORDS)), np.float32)
    for row, one in zip(dense, model.embed_sparse(texts, **options), strict=True):
        row[one.indices] = one.values
    return dense


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("write", [write_alone, write_router])
def test_weights_are_those_of_sentence_transformers(
    write: Callable[[Path], Path], as_json: bool, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    module = write(tmp_path / "folder")
    if as_json:
        name_idf(module)
    export(tmp_path / "folder", tmp_path / "bundle", target=["cpu"], precision=["fp32"])
    theirs = SparseEncoder(str(tmp_path / "folder"), device="cpu")
    queries = theirs.encode_query(TEXTS).to_dense().numpy()
    assert queries[0, WORDS.index("cat")] == IDF["cat"]
    with TextEncoder.load(tmp_path / "bundle") as model:
        np.testing.assert_allclose(densify(model, TEXTS, input_type="query"), queries, atol=NEAR)
        documents = theirs.encode_document(TEXTS).to_dense().numpy()
        np.testing.assert_allclose(densify(model, TEXTS, input_type="document"), documents, atol=NEAR)


def read_table(folder: Path) -> Any:
    """Return the weights (V,) that a folder has."""
    return read_weights(describe(folder))["words.weight"][:, 0].numpy()


def test_a_table_counts_more_than_a_file_that_nothing_names(tmp_path: Path) -> None:
    """As in sentence-transformers; a file that was named elsewhere is looked for in the folder alone."""
    module = write_alone(tmp_path / "folder")
    wanted = np.array([IDF.get(word, 0.0) for word in WORDS], np.float32)
    (module / "idf.json").write_text(json.dumps({"cat": 9.0}), encoding="utf-8")
    theirs: Any = SparseEncoder(str(tmp_path / "folder"), device="cpu")[0]
    assert read_table(tmp_path / "folder").tolist() == theirs.weight.tolist() == wanted.tolist()
    name_idf(module, cat=7.0)
    config = (module / "config.json").read_text(encoding="utf-8")
    elsewhere = config.replace(json.dumps(str(module / "idf.json"))[1:-1], "/elsewhere/idf.json")
    (module / "config.json").write_text(elsewhere, encoding="utf-8")
    assert read_table(tmp_path / "folder")[WORDS.index("cat")] == 7.0
    (module / "idf.json").rename(module / "other.json")
    with pytest.raises(ValueError, match=r"sets path='/elsewhere/idf\.json'; put that file into .*, as idf"):
        describe(tmp_path / "folder")


@pytest.mark.parametrize("weight", ["many", True, None])
def test_what_is_no_weight_is_named(weight: Any, tmp_path: Path) -> None:
    name_idf(write_alone(tmp_path / "folder"), **{"cat": weight})
    with pytest.raises(ValueError, match=f"idf.json: 'cat' with {weight!r} is no token with its weight"):
        read_table(tmp_path / "folder")


def test_what_is_no_token_is_named(tmp_path: Path) -> None:
    name_idf(write_alone(tmp_path / "folder"), zebra=1.0)
    with pytest.raises(ValueError, match=r"idf\.json: 'zebra' with 1\.0 is no token with its weight"):
        read_table(tmp_path / "folder")
