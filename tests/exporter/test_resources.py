"""What an export says of memory and disk before it starts, and what it does where there is too little."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from planforge.exporter import export, resources
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import resolve_source
from planforge.exporter.errors import OutputError
from planforge.exporter.graphs import plan_artifacts
from planforge.exporter.levels import parse_verify
from planforge.exporter.options import Request
from planforge.exporter.resources import (
    KERNELS,
    PROCESS,
    RESULT,
    SURELY,
    TRACER,
    Need,
    Weights,
    announce_need,
    estimate_need,
)
from planforge.runtime.apps.stage_progress import Notice
from planforge.runtime.bundle.bundle import Bundle

from ..helpers.paths import ROOT
from .tensorrt.test_hardware import needs_rtx

COUNT = 500_000_000
HALF = Weights(COUNT, 2 * COUNT)  # in bf16
FP32 = 4 * COUNT


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint(resolve_source("gpt2-demo"))


def make_request(*precisions: str, verify: bool = True, target: str = "cpu", output: str = "B") -> Request:
    return Request(output=Path(output), targets=(target,), precisions=precisions, level=parse_verify(verify))


def estimate(checkpoint: Checkpoint, *precisions: str, **choices: Any) -> Need:
    request = make_request(*precisions, **choices)
    artifacts = plan_artifacts(checkpoint, request.targets, request.precisions)
    return estimate_need(HALF, checkpoint, artifacts, request)


def test_weights_are_counted_by_the_headers() -> None:
    folder = resolve_source("gpt2-demo").folder
    found = Weights.read(folder)
    size = (folder / "model.safetensors").stat().st_size
    assert found is not None and found.published == size
    assert 0 <= size - 2 * found.count < 20_000  # fp16, and a header


def test_a_folder_without_safetensors_says_nothing(tmp_path: Path) -> None:
    assert Weights.read(tmp_path) is None


def test_an_unverified_export_in_fp32_needs_less_than_twice_the_checkpoint(checkpoint: Checkpoint) -> None:
    need = estimate(checkpoint, "fp32", verify=False)
    assert need.memory == PROCESS + HALF.published < 2 * HALF.published
    assert need.disk == FP32
    small = replace(HALF, published=1_000)
    request = make_request("fp32", verify=False)
    artifacts = plan_artifacts(checkpoint, request.targets, request.precisions)
    assert estimate_need(small, checkpoint, artifacts, request).memory == PROCESS + TRACER


def test_a_verified_one_needs_at_most_two_and_a_half_times_its_weights(checkpoint: Checkpoint) -> None:
    results = RESULT * checkpoint.config.vocab_size
    fp32 = estimate(checkpoint, "fp32").memory - PROCESS
    assert FP32 + results < fp32 < estimate(checkpoint, "fp32", "int8").memory - PROCESS
    assert fp32 <= 2.5 * FP32


def test_files_that_precisions_share_count_once(checkpoint: Checkpoint) -> None:
    assert estimate(checkpoint, "fp32", "fp32-kv8").disk == FP32
    assert estimate(checkpoint, "fp32", "int8", "int8-kv8").disk == FP32 + COUNT * 9 // 8
    assert estimate(checkpoint, "int8", verify=False).memory == estimate(checkpoint, "int8").memory


def test_plans_count_where_they_are_built(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    without = {}
    for installed in (False, True):
        monkeypatch.setattr(resources, "is_installed", lambda engine, installed=installed: installed)
        without[installed] = estimate(checkpoint, "fp16", target="rtx")
    assert without[True].disk > without[False].disk == 2 * COUNT
    assert without[True].memory > without[False].memory


def test_plans_that_cannot_be_for_the_named_gpus_do_not_count(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(precisions: tuple[str, ...], *sms: str) -> int:
        request = replace(make_request(*precisions, target="rtx"), sms=sms or None)
        artifacts = plan_artifacts(checkpoint, request.targets, request.precisions)
        return estimate_need(HALF, checkpoint, artifacts, request).disk

    both, one = ("fp16", "nvfp4a16"), ("fp16",)
    monkeypatch.setattr(resources, "is_installed", lambda engine: False)
    graph = measure(both) - measure(one)
    monkeypatch.setattr(resources, "is_installed", lambda engine: True)
    assert measure(both, "sm120") == measure(both) > measure(both, "sm86")
    assert measure(both, "sm86") == measure(both, "RTX 30", "RTX 50") == measure(one, "sm86") + graph


def measure_folder(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_an_export_takes_the_disk_that_was_foretold(checkpoint: Checkpoint, demo_bundle: Path) -> None:
    weights = Weights.read(checkpoint.folder)
    assert weights is not None
    artifacts = Bundle.open(demo_bundle).manifest.artifacts
    request = replace(make_request("fp32", "fp16"), targets=("cpu", "portable", "rtx"))
    need = estimate_need(weights, checkpoint, artifacts, request)
    # An export is refused where `SURELY` of it is not free, so it takes at least as much.
    assert SURELY * need.disk <= measure_folder(demo_bundle) <= need.disk / SURELY


@needs_rtx
def test_each_precision_has_a_plan_with_kernels(checkpoint: Checkpoint, tmp_path: Path) -> None:
    output = tmp_path / "B"
    lines: list[str] = []
    export(
        "gpt2-demo", output, precision=["fp16", "w8a16"], target=["rtx"], verify=False, progress=lines.append
    )
    assert len(Bundle.open(output).manifest.plans) == 2
    (told,) = [int(found[1]) for line in lines if (found := re.search(r"and (\d+) MB of disk", line))]
    assert SURELY * told * 1e6 <= measure_folder(output) <= told * 1e6 / SURELY


def test_kernels_are_as_large_as_the_demos_are_measured() -> None:
    measured = json.loads((ROOT / "benchmarks/results/plan_precisions.json").read_text(encoding="utf-8"))
    # Of one graph whose table and head are two in the graph too.
    plans = [
        plan
        for model in ("gpt2-demo", "llama-demo", "bert-demo")
        for precision, plan in measured["models"][model].items()
        if precision != "fp16" and "plan_bytes" in plan
    ]
    assert len(plans) > 10
    found = median(plan["plan_bytes"] - plan["weight_bytes"] for plan in plans)
    assert pytest.approx(found, rel=0.05) == KERNELS


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What is free; the checkpoint is `HALF`."""
    free = SimpleNamespace(memory=2**40, disk=2**40)
    monkeypatch.setattr(Weights, "read", lambda folder: HALF)
    monkeypatch.setattr(resources, "read_free_memory", lambda root: free.memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free.disk))
    return free


def announce(checkpoint: Checkpoint, request: Request) -> list[str]:
    lines: list[str] = []
    artifacts = plan_artifacts(checkpoint, request.targets, request.precisions)
    announce_need(checkpoint, artifacts, request, lines.append)
    return lines


def test_one_line_says_what_is_needed(
    checkpoint: Checkpoint, machine: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = announce(checkpoint, make_request("fp32", verify=False))
    assert isinstance(line, Notice)
    memory = f"{(PROCESS + 2 * COUNT) / 1e9:.1f} GB"
    assert line == f"500,000,000 weights: the export needs about {memory} of memory and 2.0 GB of disk"
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("precision", "verify", "hint"),
    [
        ("fp32", True, "leave out the comparison with --no-verify (verify=False), for 1."),
        ("fp32", False, "close other programs, or export on a larger machine"),
        ("int8", True, "close other programs, or export on a larger machine"),
    ],
)
def test_too_little_memory_is_a_warning_with_a_way_out(
    checkpoint: Checkpoint,
    machine: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    precision: str,
    verify: bool,
    hint: str,
) -> None:
    machine.memory = 800_000_000
    announce(checkpoint, make_request(precision, verify=verify))
    assert "of memory are needed, and 800 MB are free" in caplog.text
    assert hint in caplog.text
    machine.memory = None  # a system that doesn't say
    caplog.clear()
    announce(checkpoint, make_request(precision, verify=verify))
    assert caplog.text == ""


def test_a_disk_that_cannot_hold_it_is_refused(
    checkpoint: Checkpoint, machine: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "not there yet" / "B"
    request = make_request("fp32", output=str(output))
    machine.disk = 1_500_000_000
    with pytest.raises(OutputError) as caught:
        announce(checkpoint, request)
    assert str(caught.value) == (
        f"{output} needs about 2.0 GB of disk, and {tmp_path} has 1.5 GB free: make room there, choose"
        " another folder, or fewer precisions"
    )
    machine.disk = 1_950_000_000  # an estimate is no reason to refuse what may fit
    announce(checkpoint, request)
    assert "it may not fit" in caplog.text
