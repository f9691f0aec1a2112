"""A hint that exports a bundle again is run as it stands: it gives what was missing, and loses nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter import export
from planforge.runtime.backends.plan_compatibility import find_plans
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.export_again import suggest_export_again
from planforge.runtime.errors import BackendUnavailableError

from ...helpers.cli import error_line, planforge
from ...helpers.models import tiny_bert, write_wordpiece

CHOICES: dict[str, Any] = {"max_batch": 3, "max_length": 48, "verify": False}


def run_hint(text: str) -> None:
    """Type the command that an error names, without the comparison, which takes most of the time."""
    (command,) = re.findall("`planforge (export [^`]*)`", text)
    done = planforge(*shlex.split(command), "--no-verify")
    assert done.returncode == 0, done.stderr


def list_ids(folder: Path) -> list[str]:
    return [artifact.id for artifact in Bundle.open(folder).manifest.artifacts]


def test_a_decoder_keeps_its_precisions_and_lengths(tmp_path: Path) -> None:
    folder = tmp_path / "my bundle"
    export("gpt2-demo", folder, precision=["int8", "fp32"], target=["cpu"], **CHOICES)
    had = list_ids(folder)
    with pytest.raises(BackendUnavailableError) as caught:
        find_plans(Bundle.open(folder), "tensorrt-rtx", None)
    line = error_line("build", folder)
    assert "no fp16 decoder graph in the inplace dialect; export it again" in line
    assert line.partition("again: ")[2] == str(caught.value).partition("again: ")[2]
    run_hint(line)
    manifest = Bundle.open(folder).manifest
    assert {*had, "decoder.inplace.fp16"} <= set(list_ids(folder))
    assert manifest.artifacts[0].precision == "int8"  # run goes on to take it
    assert (manifest.max_length, manifest.artifacts[0].axis("batch").max) == (48, 3)
    assert planforge("build", folder, "--sm", "sm86").returncode == 0


def test_the_gpus_of_plans_are_kept(demo_bundle: Path) -> None:
    bundle = Bundle.open(demo_bundle)
    assert " --sm" not in suggest_export_again(bundle)  # the plan is for all
    plan = bundle.manifest.plans[0]
    plans = tuple(replace(plan, sms=sms) for sms in (("sm120", "sm86"), ("sm86",)))
    bundle = Bundle(bundle.folder, replace(bundle.manifest, plans=plans))
    assert " --sm sm86,sm120 " in suggest_export_again(bundle)


def test_an_encoder_keeps_its_outputs(tmp_path: Path) -> None:
    checkpoint = tmp_path / "it's a model"
    tiny_bert(checkpoint, "BertForSequenceClassification", num_labels=3, num_hidden_layers=1)
    write_wordpiece(checkpoint)
    folder = tmp_path / "B"
    outputs = ["hidden_states.0"]
    export(checkpoint, folder, precision=["fp32"], target=["cpu"], outputs=outputs, **CHOICES)
    run_hint(suggest_export_again(Bundle.open(folder), precisions=["fp16"], targets=["cuda"]))
    assert list_ids(folder) == ["encoder.ort.fp32", "encoder.ort.fp16"]
    for artifact in Bundle.open(folder).manifest.artifacts:
        assert "hidden_states.0" in [spec.name for spec in artifact.outputs]
        assert artifact.axis("batch").max == 3


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (["--target", "jetpack6.2"], "--target cpu,portable --precision fp32,fp16"),
        (["--target", "cpu,jetpack7.2", "--precision", "int8"], "--target cpu,rtx --precision int8,fp16"),
        (["--target", "jetpack6.0,jetpack7.2"], "--target cpu,portable,rtx --precision fp32,fp16"),
    ],
)
def test_a_board_builds_its_plan_itself(typed: Sequence[str], hint: str, tmp_path: Path) -> None:
    """docs/deploy/jetson.md forbids pip's TensorRT, and its table has the targets of each JetPack."""
    line = error_line("export", "gpt2-demo", "-o", tmp_path / "B", *typed, code=1)
    assert "pip install" not in line and "is built on the board, by JetPack's own TensorRT" in line
    assert f": export with {hint}, copy the bundle there" in line
    assert re.search(r"then `planforge build B --target jetpack[67]\.[02]`", line)
    if typed[0:2] == ["--target", "jetpack6.2"]:  # what the hint says is what the board needs
        done = planforge("export", "gpt2-demo", "-o", tmp_path / "B", *hint.split(), "--no-verify")
        assert done.returncode == 0, done.stderr
        line = error_line("build", tmp_path / "B", "--target", "jetpack6.2", code=1)
        assert "is built on the board" in line and ": copy the bundle there, then" in line


def test_a_board_without_python_3_10_is_named(tmp_path: Path) -> None:
    line = error_line("export", "gpt2-demo", "-o", tmp_path / "B", "--target", "jetpack5.1", code=1)
    assert "only for Python 3.8" in line and "docs/deploy/jetson.md" in line and "pip install" not in line
