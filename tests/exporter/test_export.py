"""export and build as a whole: what lands in the bundle, and what is left when they fail."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from safetensors.torch import load_file, save_file

from planforge.exporter import build, export
from planforge.exporter.checkpoints.source import DEMOS, OWN_DEMOS, resolve_source
from planforge.exporter.errors import (
    BuildError,
    CheckpointError,
    OutputError,
    SourceError,
    VerificationError,
)
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import BackendUnavailableError, InputError, TokenizerError

from ..helpers.models import one_layer_gpt2
from ..helpers.paths import ROOT

DEMO = DEMOS / "gpt2-demo"
SMS = ["sm75", "sm80", "sm86", "sm89", "sm120", "sm121"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the demo's checkpoint to damage."""
    return Path(shutil.copytree(DEMO, tmp_path / "checkpoint"))


def change_config(checkpoint: Path, **settings: Any) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, **settings}))


def change_weights(checkpoint: Path, suffix: str, factor: float) -> None:
    """Scales every weight whose name ends so."""
    weights = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    changed = {n: t * factor if n.endswith(suffix) else t for n, t in weights.items()}
    save_file(changed, checkpoint / "model.safetensors", metadata={"format": "pt"})


def set_generation(checkpoint: Path, **settings: Any) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps(settings))


def test_a_module_in_the_current_folder_is_never_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("onnx_ir", "random", "torch", "onnx"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close(); raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    export(checkpoint, "B", precision=["fp16"], target=["rtx"], sms=["sm86"], verify=False)
    assert not (tmp_path / "ran").exists()


def test_the_demo_becomes_graphs_a_plan_and_a_verdict(demo_bundle: Path) -> None:
    manifest = Bundle.open(demo_bundle).manifest
    ids = {artifact.id for artifact in manifest.artifacts}
    both = {f"decoder.{d}.{p}" for d in ("portable", "inplace") for p in ("fp32", "fp16")}
    assert ids == both | {"decoder.ort.fp32"}
    assert all(a.gate["passed"] and a.gate["measured"]["max_error"] > 0 for a in manifest.artifacts)
    (plan,) = manifest.plans
    assert list(plan.sms) == SMS
    assert plan.engine == "tensorrt-rtx"
    assert [profile["name"] for profile in plan.profiles] == ["prefill", "append", "decode"]
    listed = set(manifest.files) | {"manifest.json"}
    assert {p.relative_to(demo_bundle).as_posix() for p in demo_bundle.rglob("*") if p.is_file()} == listed


def test_graphs_are_valid_and_say_what_the_manifest_says(demo_bundle: Path) -> None:
    for artifact in Bundle.open(demo_bundle).manifest.artifacts:
        onnx.checker.check_model(str(demo_bundle / artifact.file), full_check=True)
        graph = ir.load(demo_bundle / artifact.file).graph
        assert graph.opset_imports[""] == artifact.opset
        for specs, values in ((artifact.inputs, graph.inputs), (artifact.outputs, graph.outputs)):
            assert [spec.name for spec in specs] == [value.name for value in values]
            for spec, value in zip(specs, values, strict=True):
                assert value.dtype is not None and value.shape is not None
                assert value.dtype.numpy().name == spec.dtype
                axes = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
                assert tuple(axes) == spec.axis_names()


def test_the_tied_embedding_is_stored_once_for_all_graphs(demo_bundle: Path) -> None:
    parameters = sum(tensor.numel() for tensor in load_file(DEMO / "model.safetensors").values())
    for precision, size, count in (("fp32", 4, 3), ("fp16", 2, 2)):
        (data,) = (demo_bundle / "onnx").glob(f"*.{precision}-*.data")
        assert data.stat().st_size < parameters * size * 1.02 + 65536
        graphs = list((demo_bundle / "onnx").glob(f"*.{precision}-*.onnx"))
        assert len(graphs) == count
        assert all(graph.stat().st_size < 100_000 for graph in graphs)


def test_slots_come_back_at_the_address_they_went_in(demo_bundle: Path) -> None:
    artifact = Bundle.open(demo_bundle).manifest.artifact("decoder.inplace.fp32")
    assert artifact.aliases == {
        f"present.{i}.{k}": f"cache.{i}.{k}" for i in range(4) for k in ("key", "value")
    }


def test_no_path_of_this_machine_is_in_the_bundle(demo_bundle: Path) -> None:
    for path in demo_bundle.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".onnx"):
            content = path.read_bytes()
            assert str(demo_bundle.parent).encode() not in content
            assert str(DEMOS).encode() not in content


def test_a_folders_path_is_kept_relative_and_found_again(checkpoint: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target": ["cpu"], "precision": ["fp32"], "verify": "quick"}
    bundle = export(checkpoint, tmp_path / "B", max_batch=2, max_length=64, **options)
    source = bundle.manifest.source
    assert source["argument"] == "../checkpoint"
    assert bundle.manifest.max_length == 64
    assert bundle.manifest.artifacts[0].axis("batch").max == 2
    assert bundle.report is not None and bundle.report.passed


def test_a_plan_can_be_built_later_and_for_fewer_architectures(own_bundle: Path) -> None:
    before = Bundle.open(own_bundle).manifest
    result = build(own_bundle, sms=["sm86", "sm89"], limits={"batch": 2, "length": 128})
    after = Bundle.open(own_bundle)
    after.verify_files()
    assert [plan.sms for plan in after.manifest.plans] == [tuple(SMS), ("sm86", "sm89")]
    assert result.plans[0].profiles[-1]["axes"]["batch"] == [1, 1, 2]
    assert after.manifest.export_id == before.export_id
    assert [a.to_json() for a in after.manifest.artifacts] == [a.to_json() for a in before.artifacts]
    old = own_bundle / result.plans[0].file
    again = build(  # replaces its like
        own_bundle, engine="tensorrt-rtx", sms=["sm86", "sm89"], limits={"batch": 2, "length": 128}
    )
    is_same = again.plans[0].file == result.plans[0].file  # as TensorRT likes
    assert old.exists() == is_same and again.replaced == (() if is_same else result.plans)
    assert Bundle.open(own_bundle).manifest.plans == (before.plans[0], *again.plans)
    assert len(list((own_bundle / "plans").iterdir())) == 2


def test_build_says_what_it_needs(own_bundle: Path) -> None:
    with pytest.raises(BuildError, match=r"sm90.*sm75"):
        build(own_bundle, sms=["sm90"])
    with pytest.raises(BackendUnavailableError, match=r"planforge\[tensorrt\]"):
        build(own_bundle, target="tensorrt")
    with pytest.raises(InputError, match="needs no plan"):
        build(own_bundle, target="cpu")
    with pytest.raises(InputError, match=r"--max past=\.\.\.: an axis is batch or length"):
        build(own_bundle, limits={"past": 3})
    with pytest.raises(InputError, match="engine 'openvino'"):
        build(own_bundle, engine="openvino")
    graph = next((own_bundle / "onnx").glob("decoder.inplace.fp16*.onnx"))
    graph.write_bytes(graph.read_bytes()[:-1] + b"x")
    with pytest.raises(Exception, match="has changed"):
        build(own_bundle)
    assert len(Bundle.open(own_bundle).manifest.plans) == 1


def test_export_keeps_nothing_when_verification_fails(checkpoint: Path, tmp_path: Path) -> None:
    change_weights(checkpoint, "mlp.c_proj.weight", 1e38)  # not finite in any precision
    with pytest.raises(VerificationError, match="PyTorch model's own results are not finite"):
        export(checkpoint, tmp_path / "B", target=["portable"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_weights_beyond_fp16_stay_in_fp32(checkpoint: Path, tmp_path: Path) -> None:
    change_weights(checkpoint, "wpe.weight", 1e7)
    options: dict[str, Any] = {"target": ["portable"], "precision": ["fp16"], "verify": "quick"}
    result = export(checkpoint, tmp_path / "B", **options)
    (artifact,) = result.manifest.artifacts
    assert artifact.passed
    weights = ir.load(result.bundle / artifact.file).graph.initializers
    assert "wpe.weight" in weights
    assert "wte.weight_fp16" in weights


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda c: (c / "model.safetensors").unlink(), CheckpointError, "neither model.safetensors nor"),
        (lambda c: os.truncate(c / "model.safetensors", 1000), CheckpointError, "not a whole safetensors"),
        (lambda c: change_config(c, n_layer=5), CheckpointError, r"missing: h\.4\.ln_1\.weight"),
        (lambda c: change_config(c, n_head=3), CheckpointError, "n_embd=256 is not a multiple of n_head=3"),
        (lambda c: change_config(c, model_type="gptj"), CheckpointError, "weights of GPTJ.* are missing"),
        (lambda c: change_config(c, vocab_size=100), CheckpointError, "tokenizer.json has 2048 tokens"),
        (lambda c: set_generation(c, eos_token_id="0"), CheckpointError, "eos_token_id is '0'"),
        (lambda c: set_generation(c, bos_token_id=[1]), CheckpointError, r"bos_token_id is \[1\]"),
        (lambda c: (c / "config.json").write_text("{"), CheckpointError, "config.json is not valid JSON"),
        (lambda c: (c / "config.json").unlink(), SourceError, "has no config.json"),
        (lambda c: (c / "tokenizer.json").unlink(), TokenizerError, "vocab.json"),
    ],
)
def test_damaged_checkpoints_are_named(
    checkpoint: Path, tmp_path: Path, damage: Any, error: type[Exception], words: str
) -> None:
    damage(checkpoint)
    with pytest.raises(error, match=words):
        export(checkpoint, tmp_path / "B", target=["cpu"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_an_existing_bundle_survives_a_failed_export(own_bundle: Path, checkpoint: Path) -> None:
    before = (own_bundle / "manifest.json").read_bytes()
    with pytest.raises(OutputError, match="--force"):
        export("gpt2-demo", own_bundle)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        export(checkpoint, own_bundle, force=True)
    assert (own_bundle / "manifest.json").read_bytes() == before
    Bundle.open(own_bundle).verify_files()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": []}, "precision=.. must name"),
        ({"precision": ["fp64"]}, "fp32, fp16"),
        ({"target": ["rtx"], "precision": ["fp32"]}, "builds its plan from fp16"),
        ({"max_batch": 0}, "max_batch=0"),
        ({"max_length": 100_000}, "max_length=100000 .* context of 256"),
        ({"max_lenght": 64}, "unknown option 'max_lenght'; did you mean 'max_length'"),
    ],
)
def test_choices_that_make_no_sense_are_named(tmp_path: Path, options: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        export("gpt2-demo", tmp_path / "B", **options)
    assert list(tmp_path.iterdir()) == []


# What was traced before is not traced again where no tracer is to be killed.
KILLED = """
import contextlib, os, signal, sys
from planforge.exporter import export
from tests.helpers.traces import trace_each_graph_once

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children ignore it
def progress(line):
    if line.startswith(sys.argv[3]):
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))

options = {"target": ["cpu"], "precision": ["fp32"], "verify": "quick"}
has_tracers = sys.argv[3] in ("tracing", "computing the reference")
with contextlib.nullcontext() if has_tracers else trace_each_graph_once():
    export(sys.argv[4], sys.argv[1], force=True, progress=progress, **options)
"""


@pytest.mark.parametrize("stage", ["tracing", "writing", "computing the reference", "committing"])
def test_a_killed_export_leaves_the_old_bundle_whole(own_bundle: Path, stage: str, tmp_path: Path) -> None:
    before = (own_bundle / "manifest.json").read_bytes()
    checkpoint = one_layer_gpt2(tmp_path / "small")
    command = [sys.executable, "-c", KILLED, str(own_bundle), "SIGKILL", stage, str(checkpoint)]
    assert subprocess.run(command, timeout=300, cwd=ROOT).returncode == -signal.SIGKILL
    assert (own_bundle / "manifest.json").read_bytes() == before
    Bundle.open(own_bundle).verify_files()


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    checkpoint = one_layer_gpt2(tmp_path / "small")
    out = tmp_path / "out"
    out.mkdir()
    stage = "computing the reference"
    command = [sys.executable, "-c", KILLED, str(out / "B"), "SIGINT", stage, str(checkpoint)]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True)
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr
    assert list(out.iterdir()) == []


def test_a_demo_without_its_weights_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert sorted(path.name for path in DEMOS.glob("*-demo")) == sorted(OWN_DEMOS)
    monkeypatch.setattr("planforge.exporter.checkpoints.source.DEMOS", tmp_path)
    with pytest.raises(SourceError, match=r"gpt2-demo .*pip install 'planforge\[demos\]'"):
        resolve_source("gpt2-demo")


def test_sources_resolve_and_the_hub_fails_at_once_offline(tmp_path: Path, checkpoint: Path) -> None:
    assert resolve_source("gpt2-demo").kind == "demo"
    assert resolve_source(checkpoint).kind == "folder"
    for name in ("gpt2", "openai-community/gpt2"):
        with pytest.raises(SourceError, match="hub cannot be reached"):
            resolve_source(name)
    for name in ("./missing", "/missing", "a/b/c", "what is this?"):
        with pytest.raises(SourceError, match="does not exist"):
            resolve_source(name)
