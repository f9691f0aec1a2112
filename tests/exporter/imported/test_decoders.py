"""Decoders that optimum exported, from random checkpoints of transformers, against transformers itself."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers

from planforge.exporter import verify
from planforge.exporter.errors import VerificationError
from planforge.exporter.exporting import import_folder
from planforge.exporter.imported import decoder
from planforge.exporter.limits import CAPS
from planforge.runtime import TextGenerator
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from ...helpers.models import edit_json, greedy
from ...helpers.plans import only
from ...helpers.same_answers import compare_tokens
from ...helpers.selftest import mend

FAMILIES = ("llama", "qwen2", "mistral", "gpt_neox", "opt", "phi")
PROMPTS = ["In the beginning God created the heaven", "And", "Now therefore " * 12]
GRAPHS = ["decoder.ort.fp32", "decoder.portable.fp32"]


@pytest.fixture
def own(exported: Path, tmp_path: Path) -> Path:
    """A copy of a folder to damage."""
    return Path(shutil.copytree(exported / "llama.onnx", tmp_path / "folder"))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_are_those_of_transformers(
    name: str, exported: Path, imported: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = imported(name)
    manifest = Bundle.open(bundle).manifest
    assert [a.id for a in manifest.artifacts] == GRAPHS and all(a.passed for a in manifest.artifacts)
    for graph in GRAPHS:
        compare_tokens(only(bundle, tmp_path / graph, graph), exported / name)


def test_prompts_begin_as_the_tokenizer_says(exported: Path, imported: Callable[[str], Path]) -> None:
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(exported / "llama")(PROMPTS[0]).input_ids
    with TextGenerator.load(imported("llama")) as model:
        assert theirs == [0, *model.tokenizer.encode(PROMPTS[0])]
        assert list(model.score(PROMPTS[0]).token_ids) == theirs
        again = model.score("<|endoftext|>" + PROMPTS[0], parse_special=True)
        assert list(again.token_ids) == theirs  # not twice
        cut = model.generate("and he said " * 200, max_new_tokens=8, truncation="tail")
        kept = [0, *model.tokenizer.encode("and he said " * 200)[-247:]]  # the first token stays
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
        exported / "llama", dtype=torch.float32
    )
    assert list(cut.token_ids) == greedy(reference, kept, 8)


def test_keys_and_values_are_kept_once_for_several_queries(imported: Callable[[str], Path]) -> None:
    artifact = Bundle.open(imported("llama")).manifest.artifact(GRAPHS[0])
    assert {spec.axis_names()[1] for spec in artifact.inputs if spec.role.startswith("past.")} == {2}
    graph = onnx.load(imported("llama") / artifact.file, load_external_data=False).graph
    attention = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    heads = {a.name: a.i for a in attention[0].attribute if a.name.endswith("heads")}
    assert len(attention) == 2 and heads == {"num_heads": 4, "kv_num_heads": 2}
    assert not [node for node in graph.node if node.op_type == "Softmax"]


@pytest.mark.parametrize("name", ["qwen2", "opt"])  # with a head of its own, and with the embedding's table
def test_weights_have_the_checkpoints_names_and_lie_once(
    name: str, exported: Path, imported: Callable[[str], Path]
) -> None:
    bundle = imported(name)
    names = {
        tensor.name.removesuffix(".transposed")
        for artifact in Bundle.open(bundle).manifest.artifacts
        for tensor in onnx.load(bundle / artifact.file, load_external_data=False).graph.initializer
        if tensor.external_data
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(exported / name)
    large = {name: p for name, p in model.named_parameters() if p.numel() * 4 >= 1024}
    assert names == set(large)
    (data,) = (bundle / "onnx").glob("*.data")
    assert data.stat().st_size < 1.02 * sum(4 * p.numel() for p in large.values())


def test_a_bundle_is_verified_again_with_and_without_its_checkpoint(
    exported: Path, imported: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(exported / "phi", tmp_path / "phi")
    bundle = Path(shutil.copytree(imported("phi"), tmp_path / "bundle"))
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    edit_json(bundle / "manifest.json", source=manifest["source"] | {"argument": "../phi"})
    report = verify(bundle)
    assert report.with_pytorch and report.passed
    assert {c.metrics["weights"] for c in report.comparisons if c.case == "weights and modules"}.isdisjoint(
        {0}
    )
    shutil.rmtree(tmp_path / "phi")
    report = verify(bundle)
    assert not report.with_pytorch and report.passed
    artifact = Bundle.open(bundle).manifest.artifact(GRAPHS[0])
    graph = onnx.load(bundle / artifact.file, load_external_data=False)
    (first, *_) = (node for node in graph.graph.node if node.op_type == "GroupQueryAttention")
    next(a for a in first.attribute if a.name == "scale").f *= 1.5
    onnx.save(graph, bundle / artifact.file)
    mend(bundle, artifact.file)
    assert {c.artifact for c in verify(bundle).comparisons if not c.passed} == {GRAPHS[0]}


def test_fp16(exported: Path, tmp_path: Path) -> None:
    folder = exported / "llama.onnx"
    options: dict[str, Any] = {"precision": ["fp32", "fp16"], "target": ["portable"], "verify": "quick"}
    result = import_folder(folder, tmp_path / "bundle", source=exported / "llama", **options)
    assert [(a.id, a.passed) for a in result.manifest.artifacts] == [
        ("decoder.portable.fp32", True),
        ("decoder.portable.fp16", True),
    ]
    sizes = [result.manifest.files[a.data[0]].bytes for a in result.manifest.artifacts]
    assert sizes[1] < 0.52 * sizes[0]


def miss_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a window were of a form that is not found, so that shared buffers compute another model."""
    monkeypatch.setattr(decoder, "measure_windows", lambda model, found, length: [None] * len(found))


@pytest.mark.parametrize("name", ["mistral", "bloom"])
def test_attention_that_is_more_than_causal_stays_as_it_is(
    name: str,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    miss_windows(monkeypatch)
    out = tmp_path / "bundle"
    options: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"], "verify": "quick"}
    result = import_folder(exported / f"{name}.onnx", out, source=exported / name, **options)
    assert [a.id for a in result.manifest.artifacts] == ["decoder.portable.fp32"]
    assert "its own attention is kept" in caplog.text
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(exported / name)
    with TextGenerator.load(out) as model:
        prompt = model.tokenizer.encode(PROMPTS[2])
        assert len(prompt) > 16
        answer = model.generate(PROMPTS[2], max_new_tokens=12)
        assert list(answer.token_ids) == greedy(reference, prompt, 12)


def test_an_unknown_form_of_attention_stays_as_it_is(
    own: Path, exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "planforge")
    graph = onnx.load(own / "model.onnx")
    (softmax, *_) = (node for node in graph.graph.node if node.op_type == "Softmax")
    scores = softmax.input[0]
    graph.graph.node.insert(
        list(graph.graph.node).index(softmax), onnx.helper.make_node("Abs", [scores], ["strange"])
    )
    softmax.input[0] = "strange"
    onnx.save(graph, own / "model.onnx")
    options: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"], "verify": "quick"}
    with pytest.raises(VerificationError, match=r"decoder\.portable\.fp32"):
        import_folder(own, tmp_path / "bundle", source=exported / "llama", **options)
    assert "its own attention is kept: no Softmax of layer 0" in caplog.text
    assert not (tmp_path / "bundle").exists()


def test_a_precision_that_loses_too_much_is_told_from_a_fault(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "prompts.txt").write_text("In the beginning\nAnd God said\n", encoding="utf-8")
    monkeypatch.setitem(CAPS["int8"], "mean_kl", 1e-12)  # whatever is lost is too much
    options: dict[str, Any] = {"source": exported / "llama", "prompts": tmp_path / "prompts.txt"}
    options |= {"target": "cpu", "verify": "quick"}
    with pytest.raises(VerificationError, match="PyTorch, rounded in the same way, has so large an"):
        import_folder(exported / "llama.onnx", tmp_path / "bundle", precision="int8", **options)
    assert "top1_changes and perplexity_change are reported but not checked, as that needs 500" in caplog.text
    with pytest.raises(VerificationError, match=r"fp32 passed: int8 can be left out") as caught:
        import_folder(exported / "llama.onnx", tmp_path / "bundle", precision=["fp32", "int8"], **options)
    assert caught.value.failed == {"decoder.ort.int8"} and "shared key-value buffer" not in str(caught.value)


def test_quantized_graphs_of_attention_that_fails_are_refused_with_the_way_out(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    miss_windows(monkeypatch)
    options: dict[str, Any] = {"source": exported / "mistral", "target": ["cpu"], "verify": "quick"}
    with pytest.raises(VerificationError, match="fp32 and fp16 do without") as caught:
        import_folder(exported / "mistral.onnx", tmp_path / "B", precision=["fp32", "int8"], **options)
    assert "decoder.ort.fp32" in caught.value.failed
    assert not (tmp_path / "B").exists()


def test_attention_that_nobody_verified_stays_as_it_is(exported: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"source": exported / "mistral", "verify": False, "target": ["cpu"]}
    result = import_folder(exported / "mistral.onnx", tmp_path / "bundle", precision=["fp32"], **options)
    assert [a.id for a in result.manifest.artifacts] == ["decoder.portable.fp32"]
    with pytest.raises(InputError, match="leave out --no-verify"):
        import_folder(exported / "mistral.onnx", tmp_path / "other", precision=["int8"], **options)
    options["verify"] = True
    with pytest.raises(InputError, match=r"runs in graphs of ort, .*, because no Softmax of"):
        import_folder(
            exported / "bloom.onnx",
            tmp_path / "other",
            source=exported / "bloom",
            precision=["int8"],
            target=["cpu"],
        )
