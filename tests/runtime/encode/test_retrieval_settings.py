"""Settings of retrieval folders that change results, against sentence-transformers, or that are refused.

V vocabulary
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

from planforge.exporter import export
from planforge.exporter.errors import CheckpointError
from planforge.runtime import TextEncoder
from planforge.runtime.encode.results import SparseEmbedding
from planforge.runtime.errors import InputError

from ...helpers.retrieval_folders import WORDS, write_colbert, write_folder

TEXTS = ["the cat sat on the mat .", "a dog ran away from the cat !", "he saw her"]
QUERIES = ["cat", "who ran away from the dog ? the cat , a dog , no cat , a dog and a dog"]
NEAR = 1e-5


def load(folder: Path) -> TextEncoder:
    export(folder, folder.parent / "bundle", target=["cpu"], precision=["fp32"])
    return TextEncoder.load(folder.parent / "bundle")


def densify(embeddings: list[SparseEmbedding]) -> Any:
    """Return weights (N, V)."""
    dense = np.zeros((len(embeddings), len(WORDS)), np.float32)
    for row, one in zip(dense, embeddings, strict=True):
        row[one.indices] = one.values
    return dense


def edit(path: Path, **changes: Any) -> None:
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | changes), encoding="utf-8")


def test_a_folder_keeps_only_so_many_weights(tmp_path: Path) -> None:
    folder = write_folder("splade", tmp_path / "splade")
    edit(folder / "config_sentence_transformers.json", max_active_dims=3)
    wanted = SparseEncoder(str(folder), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False)
    with load(folder) as model:
        found = model.embed_sparse(TEXTS)
        every = model.embed_sparse(TEXTS, max_active_dims=None)
    assert [len(one.indices) for one in found] == [3, 3, 3]
    assert np.abs(densify(found) - wanted.numpy()).max() < NEAR
    assert min(len(one.indices) for one in every) > 3


def test_weights_below_zero_are_weights(tmp_path: Path) -> None:
    folder = write_folder("router", tmp_path / "router")
    routed: Any = SparseEncoder(str(folder), device="cpu")[0]
    document = routed.sub_modules["document"]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder / "document_0_Transformer")
    torch.manual_seed(0)
    query: Any = [SparseStaticEmbedding(tokenizer=tokenizer, weight=torch.randn(len(WORDS)))]
    router = Router.for_query_document(query_modules=query, document_modules=list(document))
    other = SparseEncoder(modules=[router], device="cpu")
    other.save_pretrained(str(tmp_path / "other"))
    wanted = other.encode_query(QUERIES, convert_to_sparse_tensor=False).numpy()
    fewer = other.encode_query(QUERIES, convert_to_sparse_tensor=False, max_active_dims=2).numpy()
    assert wanted.min() < -0.1
    with load(tmp_path / "other") as model:
        assert np.abs(densify(model.embed_sparse(QUERIES, input_type="query")) - wanted).max() < NEAR
        kept = model.embed_sparse(QUERIES, input_type="query", max_active_dims=2)
        assert np.abs(densify(kept) - fewer).max() < NEAR


def test_a_query_length_below_the_expansion_is_refused_as_there(tmp_path: Path) -> None:
    expansion = {"strategy": "min", "length": 12, "attend": False, "token": None}
    write_colbert(tmp_path / "colbert", expansion)
    for path in (tmp_path / "colbert").rglob("sentence_bert_config.json"):
        edit(path, query_length=6)
    with pytest.raises(ValueError, match="query_length=6 is smaller"):
        MultiVectorEncoder(str(tmp_path / "colbert"), device="cpu")
    with pytest.raises(CheckpointError, match="query_length=6 is below the 12 tokens that queries"):
        load(tmp_path / "colbert")


def test_encoders_of_a_router_that_cut_otherwise_are_refused(tmp_path: Path) -> None:
    folder = write_folder("two-encoders", tmp_path / "two")
    edit(folder / "query_0_Transformer" / "tokenizer_config.json", model_max_length=16)
    with pytest.raises(CheckpointError, match="queries are cut or expanded otherwise than documents"):
        load(folder)


def test_encoders_of_a_router_with_other_tokens_around_texts_are_refused(tmp_path: Path) -> None:
    folder = write_folder("two-encoders", tmp_path / "two")
    edit(folder / "query_0_Transformer" / "tokenizer.json", post_processor=None)
    with pytest.raises(CheckpointError, match=r"another tokenizer than documents \(post_processor"):
        load(folder)


def test_a_prompt_that_leaves_no_room_is_refused(tmp_path: Path) -> None:
    with load(write_folder("qwen3", tmp_path / "qwen3")) as model:
        context = model.max_length
        with pytest.raises(InputError, match=r"the prompt has \d+ tokens, and there is room for \d+"):
            model.embed(TEXTS, prompt="the cat " * context)
        assert model.embed(TEXTS, prompt="the cat").shape[0] == len(TEXTS)


def test_ranges_are_those_of_the_vectors_that_the_checkpoint_gives(tmp_path: Path) -> None:
    with load(write_folder("two-encoders", tmp_path / "two")) as model:
        assert not model.defaults.normalize
        model.embed(TEXTS, precision="int8")
        with pytest.raises(InputError, match="leave out truncate_dim, pooling and normalize"):
            model.embed(TEXTS, precision="int8", normalize=True)
