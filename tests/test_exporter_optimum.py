"""`planforge export` through optimum, what it refuses, and optimum's exports of our models beside ours."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import transformers
from onnx import TensorProto, helper

from planforge.exporter import export
from planforge.exporter.errors import CheckpointError, ExportError
from planforge.exporter.imported.folder import load_graph
from planforge.exporter.imported.import_folder import import_folder
from planforge.exporter.imported.optimum import as_transformers_4, task_of
from planforge.exporter.source import demo_folder
from planforge.runtime import load
from planforge.runtime.errors import InputError

from .conftest import OPTIMUM_PYTHON
from .helpers_cli import planforge
from .helpers_models import edit_json

TEXT = "In the beginning God created the heaven and the earth"


@pytest.fixture
def own(exported: Path, tmp_path: Path) -> Path:
    """A copy of a folder to damage."""
    return Path(shutil.copytree(exported / "llama.onnx", tmp_path / "folder"))


def test_what_has_no_reference_model_goes_through_optimum(exported: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(exported / "electra", tmp_path / "checkpoint"))
    with pytest.raises(ExportError, match=r"pip install .*transformers<4\.58.*--optimum-python"):
        export(checkpoint, tmp_path / "bundle")
    with pytest.raises(ExportError, match="nowhere/python cannot be run"):
        export(checkpoint, tmp_path / "bundle", optimum_python="nowhere/python")
    with pytest.raises(InputError, match="exporter 'torch' is not one of auto, planforge, optimum"):
        export(checkpoint, tmp_path / "bundle", exporter="torch")
    python = os.path.relpath(OPTIMUM_PYTHON)  # as a user types it
    options = ["--optimum-python", python, "--precision", "fp32", "--target", "cpu", "--json"]
    done = planforge("export", checkpoint, "-o", tmp_path / "bundle", *options)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "bundle/manifest.json").read_text(encoding="utf-8"))
    assert manifest["source"]["exporter"] == "optimum"
    assert manifest["source"]["argument"] == "../checkpoint"
    assert [a["graph"] for a in manifest["artifacts"]] == ["encoder"]


def test_optimums_export_of_our_gpt2_agrees_with_ours(demo_bundle: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"exporter": "optimum", "optimum_python": str(OPTIMUM_PYTHON)}
    precision = ["fp32", "int8"]  # of trained weights
    result = export("gpt2-demo", tmp_path / "bundle", precision=precision, target=["cpu"], **options)
    assert [(a.id, a.passed) for a in result.manifest.artifacts] == [
        (f"decoder.ort.{name}", True) for name in precision
    ]

    def logits(bundle: Path) -> Any:
        with load(bundle, precision="fp32") as model:
            tokens = model.tokenizer.encode(TEXT)
            return np.concatenate(list(model.decoder.start(1, len(tokens)).extend(tokens)))

    ours = logits(demo_bundle)
    assert ours.shape[0] > 10
    np.testing.assert_allclose(logits(tmp_path / "bundle"), ours, atol=1e-4)


def test_optimums_export_of_our_bert_agrees_with_ours(minilm_bundle: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"exporter": "optimum", "optimum_python": str(OPTIMUM_PYTHON)}
    export("bert-demo", tmp_path / "bundle", precision=["fp32"], target=["cpu"], **options)
    texts = [TEXT, "And", TEXT * 4]
    with load(minilm_bundle) as ours, load(tmp_path / "bundle") as theirs:
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
            r"architectures is .'LlamaForRewards'.; known is what",
        ),
        ({"architectures": None}, "architectures is None; known is"),
        ({"auto_map": {"AutoModel": "m.M"}}, r"code of its own \(auto_map\), which is never run"),
    ],
)
def test_checkpoints_that_optimum_is_not_asked_for(
    settings: dict[str, Any], message: str, exported: Path, tmp_path: Path
) -> None:
    checkpoint = Path(shutil.copytree(exported / "llama", tmp_path / "checkpoint"))
    edit_json(checkpoint / "config.json", **settings)
    (checkpoint / "m.py").write_text("raise SystemExit('it ran')\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        export(checkpoint, tmp_path / "bundle", optimum_python=str(OPTIMUM_PYTHON))
    assert not (tmp_path / "bundle").exists()


def test_pickles_are_never_read(own: Path, exported: Path, tmp_path: Path) -> None:
    (own / "model.onnx").unlink()
    (own / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch run'\ntR.")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin, a pickle, which is never read"):
        import_folder(own, tmp_path / "bundle")
    (own / "decoy.safetensors").write_bytes(b"")
    way_out = r"only pytorch_model\.bin, a pickle.*convert it: python -c .*import LlamaForCausalLM as M"
    with pytest.raises(CheckpointError, match=way_out):
        export(own, tmp_path / "bundle", optimum_python=str(OPTIMUM_PYTHON))


def test_our_own_demos_are_of_known_tasks() -> None:
    tasks = [task_of(demo_folder(name)) for name in ("gpt2-demo", "bert-demo")]
    assert tasks == ["text-generation-with-past", "feature-extraction"]


ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_positions_that_transformers_5_writes_are_exported(exported: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(exported / "llama", tmp_path / "checkpoint"))
    given = {"rope_type": "llama3", "rope_theta": 5e5, **ROPE, "original_max_position_embeddings": 64}
    config = transformers.LlamaConfig.from_pretrained(checkpoint, rope_parameters=given)
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(checkpoint)
    options: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu"]}
    result = export(checkpoint, tmp_path / "bundle", optimum_python=str(OPTIMUM_PYTHON), **options)
    assert result.report is not None and result.report.passed
    with pytest.raises(CheckpointError, match=r"has rope_theta 500000\.0, and .* was exported with 10000"):
        import_folder(exported / "llama.onnx", tmp_path / "other", source=checkpoint, **options)


def test_settings_get_the_names_that_older_transformers_know(exported: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(exported / "gpt_neox", tmp_path / "checkpoint"))
    assert as_transformers_4(exported / "bart", tmp_path / "same") == exported / "bart"
    layers = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    edit_json(checkpoint / "config.json", rope_parameters=layers)
    assert as_transformers_4(checkpoint, tmp_path / "same") == checkpoint
    given: dict[str, Any] = {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "rope_type": "default"}
    edit_json(checkpoint / "config.json", rope_parameters=given)
    beside = as_transformers_4(checkpoint, tmp_path / "beside")
    config = json.loads((beside / "config.json").read_text(encoding="utf-8"))
    assert (config["rotary_emb_base"], config["rotary_pct"]) == (500.0, 0.5)  # of GPT-NeoX
    assert (config["rope_theta"], config["partial_rotary_factor"]) == (500.0, 0.5)  # of Phi
    assert config.get("rope_scaling") is None
    assert {file.name for file in beside.iterdir()} == {file.name for file in checkpoint.iterdir()}
    assert json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["rotary_pct"] == 0.25


def test_sentence_transformers_are_exported_without_a_head(exported: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(exported / "albert", tmp_path / "checkpoint"))
    assert task_of(checkpoint) == "fill-mask"
    (checkpoint / "modules.json").write_text("[]", encoding="utf-8")
    assert task_of(checkpoint) == "feature-extraction"


@pytest.mark.parametrize(
    ("folder", "file"),
    [
        *(("llama", "model"), ("roberta", "model"), ("t5", "encoder_model")),
        *(("t5", "decoder_model_merged"), ("bart", "decoder_model"), ("bart", "decoder_with_past_model")),
    ],
)
def test_graphs_whose_roles_cannot_be_told_are_refused(
    folder: str, file: str, exported: Path, tmp_path: Path
) -> None:
    own = Path(shutil.copytree(exported / f"{folder}.onnx", tmp_path / "folder"))
    if folder == "bart":
        (own / "decoder_model_merged.onnx").unlink(missing_ok=True)
    original = onnx.load(own / f"{file}.onnx").graph
    inputs = [value.name for value in original.input if ".1." not in value.name]
    outputs = [value.name for value in original.output if ".0." not in value.name]

    def refused(change: Callable[[onnx.GraphProto], None]) -> str:
        model = onnx.load(exported / f"{folder}.onnx" / f"{file}.onnx")
        change(model.graph)
        onnx.save(model, own / f"{file}.onnx")
        with pytest.raises((CheckpointError, ExportError)) as caught:
            import_folder(own, tmp_path / "bundle", precision=["fp32"], target=["portable"], verify=False)
        assert not (tmp_path / "bundle").exists()
        return str(caught.value)

    for name in (*inputs, *outputs):
        text = refused(partial(renamed, name, "what_is_this"))
        assert "what what_is_this means cannot be told" in text
        assert set(outputs) - {name} < {word.strip(",;.") for word in text.split()}
    for name in outputs if file != "model" or folder == "llama" else ():
        assert f"{name} is missing; the graph has {original.input[0].name}" in refused(partial(without, name))
    text = refused(partial(renamed, inputs[0], "pixel_values"))
    assert text == f"{own} is no model of text: its graph reads pixel_values"


def renamed(old: str, new: str, graph: onnx.GraphProto) -> None:
    for value in (*graph.input, *graph.output):
        value.name = new if value.name == old else value.name
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = new if name == old else name


def without(output: str, graph: onnx.GraphProto) -> None:
    graph.output.remove(next(value for value in graph.output if value.name == output))


def test_weights_beside_the_graph_are_read_those_of_constants_too(
    own: Path, exported: Path, tmp_path: Path
) -> None:
    """As optimum writes models beyond protobuf's 2 GB."""
    model = onnx.load(own / "model.onnx")
    beside: dict[str, Any] = {"location": "model.onnx_data", "size_threshold": 0, "convert_attribute": True}
    onnx.save(model, own / "model.onnx", save_as_external_data=True, **beside)
    written = onnx.load(own / "model.onnx", load_external_data=False).graph
    constants = [a.t for node in written.node for a in node.attribute if a.HasField("t")]
    assert any(tensor.external_data for tensor in constants)
    texts = []
    for name, folder in (("beside", own), ("inside", exported / "llama.onnx")):
        import_folder(folder, tmp_path / name, precision=["fp32"], target=["cpu"], verify=False)
        with load(tmp_path / name) as generator:
            texts.append(generator.generate(TEXT, max_new_tokens=20).token_ids)
    assert texts[0] == texts[1]


def outside(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="w.data", size_threshold=64)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../../secret" if entry.key == "location" else entry.value
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def outside_of_a_constant(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    node = next(node for node in model.graph.node if node.op_type == "Constant")
    tensor = node.attribute[0].t
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def linked(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="w.data", size_threshold=64)
    (folder / "w.data").rename(folder.parent / "w.data")
    (folder / "w.data").symlink_to(folder.parent / "w.data")


def in_halves(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    for value in model.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(model, folder / "model.onnx")


def without_cache(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    for value in [value for value in model.graph.input if value.name.startswith("past")]:
        value.name = value.name.replace("past", "gone")
    onnx.save(model, folder / "model.onnx")


def too_old(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    model.opset_import[0].version = 6
    onnx.save(model, folder / "model.onnx")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"config\.json does not exist"),
        (lambda folder: (folder / "model.onnx").write_bytes(b"no"), "is not an ONNX file"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: (folder / "model.onnx").rename(folder / "graph.onnx"), r"has graph\.onnx; read are"),
        (lambda folder: edit_json(folder / "config.json", max_position_embeddings=None), "says no length"),
        (outside, r"has weights in \.\./\.\./secret, outside of its folder"),
        (outside_of_a_constant, r"has weights in \.\./secret, outside of its folder"),
        (linked, r"has weights in w\.data, which is a link; copy the file there"),
        (in_halves, "computes in half precision; export it in fp32, and choose --precision fp16"),
        (without_cache, "has no cache, and LlamaForCausalLM generates text; export it again"),
        (too_old, "has opset 6 and cannot be brought to 18"),
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


def test_a_graph_may_be_a_link(exported: Path, tmp_path: Path) -> None:
    """As in the cache of a hub."""
    (tmp_path / "model.onnx").symlink_to(exported / "electra.onnx/model.onnx")
    linked, own = (load_graph(folder / "model.onnx") for folder in (tmp_path, exported / "electra.onnx"))
    assert len(own.graph.initializers) > 10
    for name, value in own.graph.initializers.items():
        twin = linked.graph.initializers[name]
        assert value.const_value is not None and twin.const_value is not None
        np.testing.assert_array_equal(twin.const_value.numpy(), value.const_value.numpy())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": ["fp32-kv8"]}, "an imported model can be fp32, fp16, int8, int4, not fp32-kv8"),
        ({"max_length": 9999}, "max_length=9999 must be from 2 to the model's context of 256"),
        ({"target": ["phone"]}, "phone"),
    ],
)
def test_choices_that_cannot_be(
    options: dict[str, Any], message: str, exported: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        import_folder(exported / "llama.onnx", tmp_path / "bundle", source=exported / "llama", **options)


def test_what_optimums_graphs_do_not_have(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="of a graph that optimum exports none can be chosen"):
        export(exported / "electra", tmp_path / "bundle", outputs=["hidden_states"])
