"""Encoder-decoders that optimum exported, from random checkpoints of transformers, against transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import transformers
from onnx import numpy_helper

from planforge.exporter import verify
from planforge.exporter.errors import CheckpointError, ExportError
from planforge.exporter.exporting import import_folder
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.plans import only
from ...helpers.same_answers import compare_translations
from ...helpers.selftest import mend

GRAPHS = ["encoder.ort.fp32", "decoder.ort.fp32", "encoder.portable.fp32", "decoder.portable.fp32"]
TEXTS = ["In the beginning God created the heaven", "And", "Now therefore the king said unto them all"]


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_translations_are_those_of_transformers(
    name: str, exported: Path, imported: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = imported(name)
    manifest = Bundle.open(bundle).manifest
    assert [a.id for a in manifest.artifacts] == GRAPHS and all(a.passed for a in manifest.artifacts)
    for dialect in ("ort", "portable"):
        graphs = [graph for graph in GRAPHS if dialect in graph]
        compare_translations(only(bundle, tmp_path / dialect, *graphs), exported / name)


def test_weights_and_tokenizers_lie_once(exported: Path, imported: Callable[[str], Path]) -> None:
    for name in ("t5", "bart"):
        bundle = imported(name)
        (data,) = (bundle / "onnx").glob("*.data")
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(exported / name)
        weights = sum(4 * p.numel() for p in model.parameters())
        head = 4 * model.get_output_embeddings().weight.numel()  # so small a tied one is there transposed too
        assert data.stat().st_size < 1.02 * (weights + head)
        assert len(list((bundle / "tokenizer").iterdir())) == 1


def test_merged_and_separate_decoders_are_the_same(exported: Path, tmp_path: Path) -> None:
    made = []
    for without in ("decoder_model_merged.onnx", "decoder_with_past_model.onnx"):
        folder = Path(shutil.copytree(exported / "bart.onnx", tmp_path / without))
        (folder / without).unlink()
        options: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"], "verify": "quick"}
        options["source"] = exported / "bart"
        result = import_folder(folder, tmp_path / f"{without}.bundle", **options)
        assert [a.id for a in result.manifest.artifacts] == GRAPHS[:2]
        made.append({s.name: s.axis_names() for s in result.manifest.artifacts[1].inputs})
    assert made[0] == made[1]


def test_fp16_and_int8(exported: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": ["fp16", "int8"], "target": ["cpu", "portable"]}
    options["verify"] = "quick"
    result = import_folder(exported / "t5.onnx", tmp_path / "bundle", source=exported / "t5", **options)
    assert all(a.passed for a in result.manifest.artifacts)
    more = ["encoder.portable.fp16", "decoder.portable.fp16", "encoder.ort.int8", "decoder.ort.int8"]
    assert [a.id for a in result.manifest.artifacts] == more


def test_a_bias_by_distance_that_is_wrong_is_found(
    imported: Callable[[str], Path], exported: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(imported("t5"), tmp_path / "bundle"))
    artifact = Bundle.open(bundle).manifest.artifact("decoder.ort.fp32")
    model = onnx.load(bundle / artifact.file)
    (table,) = (t for t in model.graph.initializer if t.name.startswith("distances"))
    array = numpy_helper.to_array(table).copy()
    array[3] += 0.5  # of tokens three behind
    table.CopyFrom(numpy_helper.from_array(array, table.name))
    onnx.save(model, bundle / artifact.file)
    mend(bundle, artifact.file)
    report = verify(bundle, source=exported / "t5", level="quick")
    assert {c.artifact for c in report.comparisons if not c.passed} == {"decoder.ort.fp32"}


def test_without_the_checkpoint_the_folders_own_graphs_are_the_reference(
    exported: Path, tmp_path: Path
) -> None:
    folder = exported / "t5.onnx"
    options: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"], "verify": "quick"}
    result = import_folder(folder, tmp_path / "bundle", **options)
    assert result.report is not None and result.report.reference == "the graphs that optimum wrote"
    artifact = result.manifest.artifact("decoder.ort.fp32")
    model = onnx.load(tmp_path / "bundle" / artifact.file, load_external_data=False)
    (first, *_) = (node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    next(a for a in first.attribute if a.name == "scale").f *= 1.5
    onnx.save(model, tmp_path / "bundle" / artifact.file)
    mend(tmp_path / "bundle", artifact.file)
    report = verify(tmp_path / "bundle", source=folder, level="quick")
    assert {c.artifact for c in report.comparisons if not c.passed} == {"decoder.ort.fp32"}


def test_attention_of_an_unknown_form_is_refused(exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported / "bart.onnx", tmp_path / "folder"))
    (folder / "decoder_model_merged.onnx").unlink()
    path = folder / "decoder_with_past_model.onnx"
    model = onnx.load(path)
    (softmax, *_) = (node for node in model.graph.node if node.op_type == "Softmax")
    softmax.op_type = "LogSoftmax"
    onnx.save(model, path)
    with pytest.raises(ExportError, match="no Softmax of layer 0 lies between its keys and values"):
        import_folder(folder, tmp_path / "bundle", source=exported / "bart", target=["cpu"])
    model = onnx.load(folder / "decoder_model.onnx")
    for node in model.graph.node:
        if "present.0.encoder.key" in node.output:
            node.op_type = "Abs"
            del node.attribute[:]
    onnx.save(model, folder / "decoder_model.onnx")
    with pytest.raises(ExportError, match=r"\.key comes from \w+, not from a product of encoder_hidden"):
        import_folder(folder, tmp_path / "bundle", source=exported / "bart", target=["cpu"])


def test_an_encoder_without_its_decoder_is_refused(exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported / "t5.onnx", tmp_path / "folder"))
    for name in ("decoder_model_merged.onnx", "decoder_with_past_model.onnx"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match=r"has decoder_model\.onnx, encoder_model\.onnx; expected"):
        import_folder(folder, tmp_path / "bundle")
    np.testing.assert_equal((tmp_path / "bundle").exists(), False)
