"""`planforge export` through optimum, what it refuses, and optimum's exports of our models beside ours."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import transformers
from onnx import TensorProto, helper

from planforge.exporter import export
from planforge.exporter.checkpoints.source import find_demo
from planforge.exporter.errors import CheckpointError, ExportError
from planforge.exporter.exporting import import_folder
from planforge.exporter.imported.architectures import TASKS, choose_task
from planforge.exporter.imported.optimum import MODEL_TYPES, write_for_transformers_4
from planforge.models.refusals import MIXTURES_OF_OPTIMUM
from planforge.runtime import TextEncoder, TextGenerator
from planforge.runtime.errors import InputError

from ...helpers.cli import planforge
from ...helpers.models import edit_json
from ...helpers.optimums import OPTIMUM_PYTHON

TEXT = "In the beginning God created the heaven and the earth"


def test_optimum_exports_where_it_is_asked_to(exported: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(exported / "electra", tmp_path / "checkpoint"))
    options: dict[str, Any] = {"exporter": "optimum"}
    with pytest.raises(ExportError, match=r"pip install .*transformers<4\.58.*--optimum-python"):
        export(checkpoint, tmp_path / "bundle", **options)
    with pytest.raises(ExportError, match="nowhere/python cannot be run"):
        export(checkpoint, tmp_path / "bundle", optimum_python="nowhere/python", **options)
    with pytest.raises(ExportError, match="has no optimum: python3 -m venv"):
        export(checkpoint, tmp_path / "bundle", optimum_python=sys.executable, **options)
    with pytest.raises(
        InputError, match="exporter 'torch' is not one of auto, planforge, transformers, optimum"
    ):
        export(checkpoint, tmp_path / "bundle", exporter="torch")
    python = os.path.relpath(OPTIMUM_PYTHON)  # as a user types it
    words = ["--exporter", "optimum", "--optimum-python", python, "--precision", "fp32", "--target", "cpu"]
    done = planforge("export", checkpoint, "-o", tmp_path / "bundle", *words, "--json")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "bundle/manifest.json").read_text(encoding="utf-8"))
    assert manifest["source"]["exporter"] == "optimum"
    assert manifest["source"]["argument"] == "../checkpoint"
    assert [a["graph"] for a in manifest["artifacts"]] == ["encoder"]


@pytest.mark.usefixtures("warm_optimum")
def test_optimums_export_of_our_gpt2_agrees_with_ours(demo_bundle: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "exporter": "optimum",
        "optimum_python": str(OPTIMUM_PYTHON),
        "verify": "quick",
    }
    precision = ["fp32", "int8"]  # of trained weights
    result = export("gpt2-demo", tmp_path / "bundle", precision=precision, target=["cpu"], **options)
    assert [(a.id, a.passed) for a in result.manifest.artifacts] == [
        (f"decoder.ort.{name}", True) for name in precision
    ]

    def logits(bundle: Path) -> Any:
        with TextGenerator.load(bundle, precision="fp32") as model:
            tokens = model.tokenizer.encode(TEXT)
            return np.concatenate(list(model.decoder.start(1, len(tokens)).extend(tokens)))

    ours = logits(demo_bundle)
    assert ours.shape[0] > 10
    np.testing.assert_allclose(logits(tmp_path / "bundle"), ours, atol=1e-4)


@pytest.mark.usefixtures("warm_optimum")
def test_optimums_export_of_our_bert_agrees_with_ours(minilm_bundle: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "exporter": "optimum",
        "optimum_python": str(OPTIMUM_PYTHON),
        "verify": "quick",
    }
    export("bert-demo", tmp_path / "bundle", precision=["fp32"], target=["cpu"], **options)
    texts = [TEXT, "And", TEXT * 4]
    with TextEncoder.load(minilm_bundle) as ours, TextEncoder.load(tmp_path / "bundle") as theirs:
        assert theirs.defaults.pooling == ours.defaults.pooling == "mean"
        for one, two in zip(ours.features(texts), theirs.features(texts), strict=True):
            np.testing.assert_allclose(two.vectors, one.vectors, atol=1e-4)
        np.testing.assert_allclose(theirs.embed(texts), ours.embed(texts), atol=1e-5)


# Plans


def test_a_plan_is_built_of_what_tensorrt_takes(exported: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": ["fp32", "fp16"], "target": ["rtx"], "sms": ["sm86"]}
    result = import_folder(exported / "electra.onnx", tmp_path / "bundle", **options)
    (plan,) = result.manifest.plans
    assert plan.built_from == "encoder.portable.fp16"


def test_what_tensorrt_refuses_is_said_in_lints_words(
    exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(exported / "electra.onnx", tmp_path / "folder"))
    model = onnx.load(folder / "model.onnx")
    logits = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["before" if name == logits else name for name in node.output]
    # Half of the sum of a determinant and its negative is nothing; TensorRT has no Det.
    eye = helper.make_tensor("eye", TensorProto.FLOAT, [1, 1], [0.0])
    model.graph.initializer.append(eye)
    model.graph.node.extend(
        [
            helper.make_node("ReduceSum", ["before"], ["all"], keepdims=0),
            helper.make_node("Mul", ["eye", "all"], ["nothing"]),
            helper.make_node("Det", ["nothing"], ["determinant"], name="strange"),
            helper.make_node("Add", ["before", "determinant"], [logits]),
        ]
    )
    onnx.save(model, folder / "model.onnx")
    options: dict[str, Any] = {"precision": ["fp32", "fp16"], "target": ["cpu", "rtx"], "sms": ["sm86"]}
    caplog.set_level(logging.WARNING, "planforge")
    result = import_folder(folder, tmp_path / "bundle", source=exported / "electra", **options)
    assert not result.manifest.plans and len(result.manifest.artifacts) == 3
    assert "no plan was built" in caplog.text
    assert "encoder.portable.fp16: strange: " in caplog.text and "Det" in caplog.text


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["ViTForImageClassification"], "image_size": 224}, "is a model of images"),
        ({"architectures": ["WhisperForConditionalGeneration"], "num_mel_bins": 80}, "is a model of sound"),
        (
            {"architectures": ["LlamaForRewards"]},
            r"architectures is .'LlamaForRewards'.; supported are those",
        ),
        ({"architectures": None}, "architectures is None; supported are"),
        ({"auto_map": {"AutoModel": "m.M"}}, r"custom code \(auto_map\), which is never run"),
    ],
)
def test_checkpoints_that_optimum_is_not_asked_for(
    settings: dict[str, Any], message: str, exported: Path, tmp_path: Path
) -> None:
    checkpoint = Path(shutil.copytree(exported / "llama", tmp_path / "checkpoint"))
    edit_json(checkpoint / "config.json", **settings)
    (checkpoint / "m.py").write_text("raise SystemExit('it ran')\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        export(checkpoint, tmp_path / "bundle", exporter="optimum", optimum_python=str(OPTIMUM_PYTHON))
    assert not (tmp_path / "bundle").exists()


def test_our_own_demos_are_of_known_tasks() -> None:
    tasks = [choose_task(find_demo(name)) for name in ("gpt2-demo", "bert-demo")]
    assert tasks == ["text-generation-with-past", "feature-extraction"]


LIST_TYPES = """
import json, sys
import optimum.exporters.onnx.model_configs
from optimum.exporters.tasks import TasksManager

known = TasksManager._LIBRARY_TO_SUPPORTED_MODEL_TYPES["transformers"]
tasks = {task.removesuffix("-with-past") for task in sys.argv[1:]}
print(json.dumps([kind for kind, exporters in known.items() if tasks & set(exporters.get("onnx", {}))]))
"""
# Types that optimum has and PlanForge refuses, or reads under another name.
LEFT_OUT = {
    "deepseek_v3",  # keys and values of different sizes
    "encoder-decoder",  # two models in one
    "gemma3",  # of images and text; of text alone is gemma3_text
    "layoutlmv3",  # of images
    "perceiver",  # of images
    "qwen3_moe",  # a mixture whose weights cannot be compared
}


@pytest.mark.usefixtures("warm_optimum")
def test_the_types_that_optimum_knows_are_those_of_the_package() -> None:
    tasks = sorted(set(TASKS.values()) - {"feature-extraction"})
    done = subprocess.run(
        [OPTIMUM_PYTHON, "-c", LIST_TYPES, *tasks], capture_output=True, text=True, check=True
    )
    assert set(MODEL_TYPES) == set(json.loads(done.stdout.splitlines()[-1])) - LEFT_OUT
    assert set(MIXTURES_OF_OPTIMUM) < set(MODEL_TYPES)


ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.usefixtures("warm_optimum")
def test_positions_that_transformers_5_writes_are_exported(exported: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(exported / "llama", tmp_path / "checkpoint"))
    given = {"rope_type": "llama3", "rope_theta": 5e5, **ROPE, "original_max_position_embeddings": 64}
    config = transformers.LlamaConfig.from_pretrained(checkpoint, rope_parameters=given)
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(checkpoint)
    options: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"], "verify": "quick"}
    options["optimum_python"] = str(OPTIMUM_PYTHON)
    result = export(checkpoint, tmp_path / "bundle", exporter="optimum", **options)
    del options["optimum_python"]
    assert result.report is not None and result.report.passed
    folder = Path(shutil.copytree(exported / "llama.onnx", tmp_path / "folder"))
    edit_json(folder / "config.json", rope_parameters=given)  # which 4.57 hands on
    with pytest.raises(CheckpointError, match=r"has rope_theta 500000\.0, the graphs of .* have 10000"):
        import_folder(folder, tmp_path / "other", source=checkpoint, **options)


def test_settings_get_the_names_that_older_transformers_know(exported: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(exported / "gpt_neox", tmp_path / "checkpoint"))
    assert write_for_transformers_4(exported / "bart", tmp_path / "same") == exported / "bart"
    layers: dict[str, Any] = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    edit_json(checkpoint / "config.json", rope_parameters=layers)
    beside = write_for_transformers_4(checkpoint, tmp_path / "layers")
    config = json.loads((beside / "config.json").read_text(encoding="utf-8"))
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)  # of Gemma 3
    layers["sliding_attention"] |= {"rope_type": "linear", "factor": 2.0}
    edit_json(checkpoint / "config.json", rope_parameters=layers)
    assert write_for_transformers_4(checkpoint, tmp_path / "same") == checkpoint
    long = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    edit_json(
        checkpoint / "config.json",
        rope_parameters={**long, "rope_theta": 1e4, "original_max_position_embeddings": 64},
    )
    config = json.loads(
        (write_for_transformers_4(checkpoint, tmp_path / "long") / "config.json").read_text("utf-8")
    )
    assert set(config["rope_scaling"]) == {"type", "short_factor", "long_factor"}  # all that Phi3Config takes
    assert config["original_max_position_embeddings"] == 64
    given: dict[str, Any] = {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "rope_type": "default"}
    edit_json(checkpoint / "config.json", rope_parameters=given)
    beside = write_for_transformers_4(checkpoint, tmp_path / "beside")
    config = json.loads((beside / "config.json").read_text(encoding="utf-8"))
    assert (config["rotary_emb_base"], config["rotary_pct"]) == (500.0, 0.5)  # of GPT-NeoX
    assert (config["rope_theta"], config["partial_rotary_factor"]) == (500.0, 0.5)  # of Phi
    assert config.get("rope_scaling") is None
    assert {file.name for file in beside.iterdir()} == {file.name for file in checkpoint.iterdir()}
    assert json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["rotary_pct"] == 0.25


def test_sentence_transformers_are_exported_without_a_head(exported: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(exported / "albert", tmp_path / "checkpoint"))
    assert choose_task(checkpoint) == "fill-mask"
    (checkpoint / "modules.json").write_text("[]", encoding="utf-8")
    assert choose_task(checkpoint) == "feature-extraction"
