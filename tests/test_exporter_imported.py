"""Decoders that optimum exported, from random checkpoints of transformers, against transformers itself."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers

from planforge.exporter import verify
from planforge.exporter.errors import CheckpointError, ExportError, VerificationError
from planforge.exporter.imported.import_folder import import_folder, import_model
from planforge.exporter.imported.optimum import export_with_optimum
from planforge.runtime import load
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from .conftest import Once
from .helpers_models import edit_json, greedy
from .helpers_plans import only
from .helpers_selftest import mend

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / "build/optimum-venv/bin/python"
FAMILIES = ("llama", "qwen2", "gpt_neox", "opt", "phi")
PROMPTS = ["In the beginning God created the heaven", "And", "Now therefore " * 12]
GRAPHS = ["decoder.ort.fp32", "decoder.portable.fp32"]

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs make build/optimum-venv/.ready")


@pytest.fixture(scope="session")
def exported(once: Callable[[str], Once]) -> Path:
    """Checkpoints by their names, and beside them what optimum made of each. Don't change it."""
    with once("imported") as (folder, first):
        if first:
            folder.mkdir()
            script = ROOT / "tests/imported_checkpoints.py"
            done = subprocess.run([PYTHON, script, folder], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture(scope="session")
def bundles(exported: Path, once: Callable[[str], Once]) -> Callable[[str], Path]:
    """Verified bundles, with their source recorded. Don't change them."""

    def bundle(name: str) -> Path:
        with once(f"imported-{name}") as (folder, first):
            if first:
                import_folder(
                    exported / f"{name}.onnx", folder, source=exported / name, target=["cpu", "portable"]
                )
        return folder

    return bundle


@pytest.fixture
def own(exported: Path, tmp_path: Path) -> Path:
    """A copy of a folder to damage."""
    return Path(shutil.copytree(exported / "llama.onnx", tmp_path / "folder"))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_are_those_of_transformers(
    name: str, exported: Path, bundles: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = bundles(name)
    manifest = Bundle.open(bundle).manifest
    assert [a.id for a in manifest.artifacts] == GRAPHS and all(a.passed for a in manifest.artifacts)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(exported / name, dtype=torch.float32)
    for graph in GRAPHS:
        with load(only(bundle, tmp_path / graph, graph)) as model:
            prompts = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
            wanted = [greedy(reference, prompt, 20) for prompt in prompts]
            assert len({token for tokens in wanted for token in tokens}) >= 8
            answers = model.generate(PROMPTS, max_new_tokens=20)  # a padded batch
            drafted = model.generate(PROMPTS[0], max_new_tokens=20, speculative="prompt-lookup")
            assert [list(answer.token_ids) for answer in answers] == wanted
            assert list(drafted.token_ids) == wanted[0]


def test_keys_and_values_are_kept_once_for_several_queries(bundles: Callable[[str], Path]) -> None:
    artifact = Bundle.open(bundles("llama")).manifest.artifact(GRAPHS[0])
    assert {spec.axis_names()[1] for spec in artifact.inputs if spec.role.startswith("past.")} == {2}
    graph = onnx.load(bundles("llama") / artifact.file, load_external_data=False).graph
    attention = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    heads = {a.name: a.i for a in attention[0].attribute if a.name.endswith("heads")}
    assert len(attention) == 2 and heads == {"num_heads": 4, "kv_num_heads": 2}
    assert not [node for node in graph.node if node.op_type == "Softmax"]


def test_weights_have_the_checkpoints_names_and_lie_once(
    exported: Path, bundles: Callable[[str], Path]
) -> None:
    bundle = bundles("qwen2")
    names = {
        tensor.name.removesuffix(".transposed")
        for artifact in Bundle.open(bundle).manifest.artifacts
        for tensor in onnx.load(bundle / artifact.file, load_external_data=False).graph.initializer
        if tensor.external_data
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(exported / "qwen2")
    large = {name: p for name, p in model.named_parameters() if p.numel() * 4 >= 1024}
    assert names == set(large)
    (data,) = (bundle / "onnx").glob("*.data")
    assert data.stat().st_size < 1.02 * sum(4 * p.numel() for p in large.values())


def test_a_bundle_is_verified_again_with_and_without_its_checkpoint(
    exported: Path, bundles: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(exported / "phi", tmp_path / "phi")
    bundle = Path(shutil.copytree(bundles("phi"), tmp_path / "bundle"))
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    edit_json(bundle / "manifest.json", source=manifest["source"] | {"argument": "../phi"})
    report = verify(bundle)
    assert report.with_pytorch and report.passed
    assert {
        c.metrics["weights"] for c in report.comparisons if c.case == "attributes and weights"
    }.isdisjoint({0})
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
    options: dict[str, Any] = {"precision": ["fp32", "fp16"], "target": ["portable"]}
    result = import_folder(folder, tmp_path / "bundle", source=exported / "llama", **options)
    assert [(a.id, a.passed) for a in result.manifest.artifacts] == [
        ("decoder.portable.fp32", True),
        ("decoder.portable.fp16", True),
    ]
    sizes = [result.manifest.files[a.data[0]].bytes for a in result.manifest.artifacts]
    assert sizes[1] < 0.52 * sizes[0]


@pytest.mark.parametrize("name", ["mistral", "bloom"])
def test_attention_that_is_more_than_causal_stays_as_it_is(
    name: str, exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "bundle"
    result = import_folder(exported / f"{name}.onnx", out, source=exported / name)
    assert [a.id for a in result.manifest.artifacts] == ["decoder.portable.fp32"]
    assert "is left out" in caplog.text or "attention stays as it is" in caplog.text
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(exported / name)
    with load(out) as model:
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
    with pytest.raises(VerificationError, match=r"decoder\.portable\.fp32"):
        import_folder(own, tmp_path / "bundle", source=exported / "llama")
    assert "attention stays as it is: no Softmax of layer 0" in caplog.text
    assert not (tmp_path / "bundle").exists()


def test_attention_that_nobody_verified_stays_as_it_is(exported: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"source": exported / "mistral", "verify": False}
    result = import_folder(exported / "mistral.onnx", tmp_path / "bundle", **options)
    assert [a.id for a in result.manifest.artifacts] == ["decoder.portable.fp32"]
    with pytest.raises(InputError, match="leave out --no-verify"):
        import_folder(exported / "mistral.onnx", tmp_path / "other", precision=["int8"], **options)


# Bad input


def test_what_is_no_decoder_of_text_is_refused(own: Path, exported: Path, tmp_path: Path) -> None:
    def refused(change: Callable[[onnx.GraphProto], None]) -> str:
        model = onnx.load(exported / "llama.onnx/model.onnx")
        change(model.graph)
        onnx.save(model, own / "model.onnx")
        with pytest.raises((CheckpointError, ExportError)) as caught:
            import_folder(own, tmp_path / "bundle")
        assert not (tmp_path / "bundle").exists()
        return str(caught.value)

    def renamed(old: str, new: str) -> Callable[[onnx.GraphProto], None]:
        def change(graph: onnx.GraphProto) -> None:
            for value in (*graph.input, *graph.output):
                value.name = new if value.name == old else value.name
            for node in graph.node:
                for names in (node.input, node.output):
                    for index, name in enumerate(names):
                        names[index] = new if name == old else name

        return change

    text = refused(renamed("attention_mask", "pixel_values"))
    assert text == f"{own} is no model of text: its graph reads pixel_values"
    text = refused(renamed("attention_mask", "what_is_this"))
    assert "what what_is_this means cannot be told; the graph has input_ids, what_is_this" in text
    text = refused(renamed("present.1.value", "state"))
    assert text.startswith("what state means cannot be told")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "model.onnx").write_bytes(b"no"), "is not an ONNX file"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: (folder / "model.onnx").rename(folder / "decoder.onnx"), "this version imports"),
        (lambda folder: edit_json(folder / "config.json", max_position_embeddings=None), "says no length"),
    ],
)
def test_folders_that_cannot_be_used(
    change: Callable[[Path], None], message: str, own: Path, tmp_path: Path
) -> None:
    change(own)
    with pytest.raises(Exception, match=message) as caught:
        import_folder(own, tmp_path / "bundle")
    assert type(caught.value).__module__.startswith("planforge") and "\n" not in str(caught.value)
    assert not (tmp_path / "bundle").exists()


def test_pickles_and_code_are_never_run(own: Path, exported: Path, tmp_path: Path) -> None:
    (own / "model.onnx").unlink()
    (own / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch run'\ntR.")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin, a pickle, which is never read"):
        import_folder(own, tmp_path / "bundle")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin, a pickle.*convert it: python -c"):
        export_with_optimum(own, tmp_path / "out", str(PYTHON))
    code = Path(shutil.copytree(exported / "llama", tmp_path / "code"))
    edit_json(code / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (code / "modeling.py").write_text("raise SystemExit('it ran')\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"code of its own \(auto_map\), which is never run"):
        import_model(code, tmp_path / "bundle", optimum_python=str(PYTHON))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": ["rtx"]}, "an imported model is for cpu, portable, cuda, not yet for rtx"),
        ({"precision": ["fp32-kv8"]}, "an imported model can be fp32, fp16, int8, int4, not yet fp32-kv8"),
        ({"max_length": 9999}, "max_length=9999 must be from 2 to the model's context of 256"),
    ],
)
def test_choices_that_cannot_be(
    options: dict[str, Any], message: str, exported: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        import_folder(exported / "llama.onnx", tmp_path / "bundle", source=exported / "llama", **options)


def test_optimum_exports_in_an_environment_of_its_own(exported: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(exported / "gpt_neox", tmp_path / "checkpoint"))
    with pytest.raises(ExportError, match=r"pip install .*transformers<4\.58.*--optimum-python"):
        import_model(checkpoint, tmp_path / "bundle")
    with pytest.raises(ExportError, match="nowhere/python cannot be run"):
        import_model(checkpoint, tmp_path / "bundle", optimum_python="nowhere/python")
    result = import_model(checkpoint, tmp_path / "bundle", optimum_python=str(PYTHON))
    assert [(a.id, a.passed) for a in result.manifest.artifacts] == [("decoder.ort.fp32", True)]
    assert result.manifest.source["argument"] == "../checkpoint"
    assert result.manifest.source["exporter"] == "optimum"
