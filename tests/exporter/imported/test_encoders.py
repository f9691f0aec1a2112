"""Encoders that optimum exported, from random checkpoints of transformers, against transformers itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import sentence_transformers
import tokenizers
import transformers
from tokenizers import processors

from planforge.exporter import verify
from planforge.exporter.errors import CheckpointError, ExportError
from planforge.exporter.exporting import import_folder
from planforge.runtime import TextEncoder
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.defaults import SpecialTokens
from planforge.runtime.errors import InputError
from planforge.runtime.text.long_text import fit

from ...helpers.models import edit_json
from ...helpers.plans import only
from ...helpers.same_answers import (
    PAIR,
    TEXTS,
    compare_classes,
    compare_masked_words,
    compare_vectors,
)

GRAPHS = ["encoder.ort.fp32", "encoder.portable.fp32"]


@pytest.mark.parametrize("name", ["roberta", "mpnet", "deberta"])
def test_embeddings_and_features_are_those_of_transformers(
    name: str, exported: Path, imported: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = imported(name)
    manifest = Bundle.open(bundle).manifest
    assert [a.id for a in manifest.artifacts] == GRAPHS and all(a.passed for a in manifest.artifacts)
    for graph in GRAPHS:
        compare_vectors(only(bundle, tmp_path / graph, graph), exported / name)


def test_classes_of_texts_and_pairs_are_those_of_transformers(
    exported: Path, imported: Callable[[str], Path]
) -> None:
    with TextEncoder.load(imported("electra")) as model:
        assert model.heads == ("sequence_classification",)
        compare_classes(model, exported / "electra")
        with pytest.raises(InputError, match="embed needs hidden states, which this bundle's graph does not"):
            model.embed(TEXTS[0])


def test_masked_words_are_those_of_transformers(exported: Path, imported: Callable[[str], Path]) -> None:
    with TextEncoder.load(imported("albert")) as model:
        compare_masked_words(model, exported / "albert")


@pytest.mark.parametrize(
    ("name", "between", "context"), [("roberta", 2, 252), ("mpnet", 2, 254), ("electra", 1, 256)]
)
def test_sequences_are_framed_and_cut_as_in_transformers(
    name: str, between: int, context: int, exported: Path, imported: Callable[[str], Path]
) -> None:
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(exported / name)
    with TextEncoder.load(imported(name)) as model:
        assert (model.defaults.separators, model.defaults.max_length) == (between, context)
        first, second = (model.tokenizer.encode(text) for text in PAIR)
        options: dict[str, Any] = {"max_length": context, "truncation": "head"}
        around_two = model.defaults.make_special_tokens(is_pair=True)
        (single,) = fit(first, None, special_tokens=model.defaults.make_special_tokens(), **options).pieces
        (pair,) = fit(first, second, special_tokens=around_two, **options).pieces
        assert single.ids == theirs(PAIR[0]).input_ids
        assert pair.ids == theirs(*PAIR).input_ids
        start, body = pair.body
        assert pair.ids[start : start + len(body)] == second
        (cut,) = fit(first * 99, second * 99, special_tokens=around_two, **options).pieces
        assert len(cut) == context and cut.ids.count(model.defaults.tokens["sep"]) == between + 1


def test_texts_are_framed_as_the_checkpoints_own_tokenizer_says(exported: Path, tmp_path: Path) -> None:
    """Not as usual for such a model: nothing stands before texts, and nothing behind a pair."""
    checkpoint = Path(shutil.copytree(exported / "electra", tmp_path / "checkpoint"))
    tokenizer: Any = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    separator = tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B:1", [("</s>", separator)])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    import_folder(
        exported / "electra.onnx", tmp_path / "bundle", source=checkpoint, precision=["fp32"], target=["cpu"]
    )
    with TextEncoder.load(tmp_path / "bundle") as model:
        single, pair = SpecialTokens(suffix=(separator,)), SpecialTokens(between=(separator,))
        assert model.defaults.frames == (single, pair)
        compare_classes(model, checkpoint)


def test_fp16_and_int8(exported: Path, tmp_path: Path) -> None:
    """ALBERT reads every weight in each layer, DeBERTa's attention some of them for words and distances."""
    options: dict[str, Any] = {"precision": ["fp16", "int8"], "target": ["cpu", "portable"]}
    options["verify"] = "quick"
    for name in ("albert", "deberta"):
        result = import_folder(exported / f"{name}.onnx", tmp_path / name, source=exported / name, **options)
        assert {a.id: a.passed for a in result.manifest.artifacts} == dict.fromkeys(
            ["encoder.portable.fp16", "encoder.ort.int8"], True
        )
        graph = onnx.load(
            tmp_path / name / result.manifest.artifact("encoder.ort.int8").file, load_external_data=False
        )
        products = [node for node in graph.graph.node if node.op_type == "MatMulIntegerToFloat"]
        assert len(products) >= 6  # of two layers
        # ONNX Runtime on a processor without VNNI fails where two products share their columns.
        columns = [node.input[1] for node in products]
        assert len(set(columns)) == len(columns)
        places = {
            tuple((entry.key, entry.value) for entry in constant.external_data)
            for constant in graph.graph.initializer
            if constant.name in columns and constant.external_data
        }
        if name == "albert":
            assert len(places) < len(columns)  # what layers share is stored once


def test_branches_that_are_always_taken_become_part_of_the_graph(
    exported: Path, imported: Callable[[str], Path]
) -> None:
    before = onnx.load(exported / "deberta.onnx/model.onnx").graph
    artifact = Bundle.open(imported("deberta")).manifest.artifacts[0]
    after = onnx.load(imported("deberta") / artifact.file, load_external_data=False).graph
    assert [node for node in before.node if node.op_type == "If"]
    assert not [node for node in after.node if node.op_type == "If"]


def test_sentence_transformers_says_how_to_pool(exported: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(exported / "roberta", tmp_path / "checkpoint"))
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (checkpoint / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (checkpoint / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_cls_token": True}
    (checkpoint / "1_Pooling/config.json").write_text(json.dumps(pooling), encoding="utf-8")
    (checkpoint / "2_Normalize").mkdir()
    import_folder(
        exported / "roberta.onnx", tmp_path / "bundle", source=checkpoint, precision=["fp32"], target=["cpu"]
    )
    theirs = sentence_transformers.SentenceTransformer(str(checkpoint), device="cpu")
    with TextEncoder.load(tmp_path / "bundle") as model:
        np.testing.assert_allclose(model.embed(TEXTS), theirs.encode(TEXTS), atol=1e-5)
    pooling["pooling_mode_cls_token"], pooling["pooling_mode_mean_sqrt_len_tokens"] = False, True
    (checkpoint / "1_Pooling/config.json").write_text(json.dumps(pooling), encoding="utf-8")
    with pytest.raises(CheckpointError, match="has the pooling mean_sqrt_len_tokens with 0 layers after"):
        import_folder(exported / "roberta.onnx", tmp_path / "other", source=checkpoint)


def test_without_the_checkpoint_the_folders_own_graph_is_the_reference(
    exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(exported / "roberta.onnx", tmp_path / "folder"))
    result = import_folder(folder, tmp_path / "bundle", precision=["fp32"], target=["cpu"])
    assert result.report is not None and result.report.reference == "the graphs that optimum wrote"
    assert "the bundle is compared only with its graphs" in caplog.text
    assert verify(tmp_path / "bundle").passed
    with pytest.raises(InputError, match="int8 and int4 need the checkpoint's weights"):
        import_folder(folder, tmp_path / "other", precision=["int8"], target=["cpu"])
    model = onnx.load(folder / "model.onnx")
    (norm, *_) = (node for node in model.graph.node if node.op_type == "LayerNormalization")
    next(a for a in norm.attribute if a.name == "epsilon").f = 0.5
    onnx.save(model, folder / "model.onnx")
    report = verify(tmp_path / "bundle")  # the folder has changed, so golden data is what counts
    assert report.passed and not report.reference and not report.with_pytorch


def test_padding_may_be_the_last_word(exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported / "electra.onnx", tmp_path / "folder"))
    edit_json(folder / "config.json", pad_token_id=2055)
    result = import_folder(
        folder, tmp_path / "bundle", source=exported / "electra", precision=["fp32"], target=["cpu"]
    )
    assert result.manifest.encoder is not None and result.manifest.encoder.max_length == 256


def test_an_output_that_cannot_be_told_is_named(exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported / "electra.onnx", tmp_path / "folder"))
    model = onnx.load(folder / "model.onnx")
    model.graph.output[0].name = "verdict"
    for node in model.graph.node:
        node.output[:] = ["verdict" if name == "logits" else name for name in node.output]
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(ExportError, match="verdict is not a known input or output; the graph has input_ids"):
        import_folder(folder, tmp_path / "bundle")
