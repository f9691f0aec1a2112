"""`build` adds plans to a bundle: which stay, which are replaced, and that it is said."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from planforge.exporter import build
from planforge.exporter.bundle.writer import list_file_entries
from planforge.exporter.errors import BuildError
from planforge.exporter.tensorrt import plans
from planforge.exporter.tensorrt.build import Options, PlanRequest, build_plan
from planforge.exporter.tensorrt.plans import replace_plans
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.plan import Plan

from ...helpers.plans import of_tensorrt, with_manifest


def test_build_keeps_plans_for_other_lengths_and_gpus(own_bundle: Path) -> None:
    said: list[str] = []
    (exported,) = Bundle.open(own_bundle).manifest.plans
    small = build(own_bundle, target="rtx", limits={"batch": 2}, progress=said.append)
    few = build(own_bundle, target="rtx", sms=["sm89"], progress=said.append)
    assert small.replaced == few.replaced == ()
    assert not any("replaced" in line for line in said)
    before = Bundle.open(own_bundle)
    assert before.manifest.plans == (exported, *small.plans, *few.plans)
    before.verify_files()

    again = build(
        own_bundle, target="rtx", limits={"batch": 2}, options=Options(strip=True), progress=said.append
    )
    assert again.replaced == small.plans
    assert said[-1] == (
        f"replaced {small.plans[0].file}, which was for the same graph, GPUs and lengths, with other options"
        " or of another version"
    )
    after = Bundle.open(own_bundle)
    assert after.manifest.plans == (exported, *few.plans, *again.plans)
    after.verify_files()
    assert not (own_bundle / small.plans[0].file).exists()

    tuned = build(own_bundle, target="rtx", limits={"batch": 2}, options=Options(opt=[{"batch": 2}]))
    assert tuned.replaced == again.plans  # it takes the same shapes


def test_a_plan_built_again_is_compared_with_the_one_before(
    own_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which bytes TensorRT gives is decided here: it is free to give the same, or others."""
    (exported,) = Bundle.open(own_bundle).manifest.plans
    content = (own_bundle / exported.file).read_bytes()

    def build_as_decided(request: PlanRequest) -> Plan:
        plan = build_plan(request)
        request.out.write_bytes(content)
        return plan

    monkeypatch.setattr(plans, "build_plan", build_as_decided)
    said: list[str] = []
    same = build(own_bundle, target="rtx", progress=said.append)
    assert same.plans == (exported,) and same.replaced == ()
    assert said[-1] == f"built {exported.file} again, and TensorRT gave the same bytes"
    content += b"0"
    other = build(own_bundle, target="rtx", progress=said.append)
    assert other.replaced == (exported,) and other.plans[0].file != exported.file
    assert said[-1].endswith("TensorRT gave other bytes")
    assert Bundle.open(own_bundle).manifest.plans == other.plans
    content += b"0"
    build(own_bundle, target="rtx", options=Options(builder_level=1), progress=said.append)
    told = "which was for the same graph, GPUs and lengths, with other options or of another version"
    assert said[-1] == f"replaced {other.plans[0].file}, {told}"
    Bundle.open(own_bundle).verify_files()


def test_a_plan_that_was_not_built_comes_with_the_command_that_builds_it(
    own_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plans, "is_installed", lambda engine: False)
    caplog.set_level(logging.WARNING, "planforge")
    manifest = Bundle.open(own_bundle).manifest
    assert plans.build_plans(own_bundle, manifest, plans.USUAL_TARGETS, None, lambda *_: None, None) == []
    assert "'planforge[tensorrt-rtx]', then `planforge build BUNDLE --target rtx`" in caplog.text
    assert "for a CPU alone, export with --target cpu" in caplog.text


def test_plans_of_another_library_stay(own_bundle: Path) -> None:
    (rtx,) = Bundle.open(own_bundle).manifest.plans
    (standard,) = Bundle.open(with_manifest(own_bundle, of_tensorrt)).manifest.plans
    manifest = replace_plans(Bundle.open(own_bundle).manifest, [rtx], list_file_entries(own_bundle))
    assert manifest.plans == (standard, rtx)


def test_a_build_that_fails_leaves_all_plans(own_bundle: Path) -> None:
    before = (own_bundle / "manifest.json").read_bytes()
    said: list[str] = []
    with pytest.raises(BuildError, match="--max batch=99 is outside of what the graph allows"):
        build(own_bundle, target="rtx", limits={"batch": 99}, progress=said.append)
    with pytest.raises(BuildError, match="--opt length=999 is outside of what the graph allows"):
        build(own_bundle, target="rtx", options=Options(opt=[{"length": 999}]), progress=said.append)
    assert said == []  # nothing was begun
    assert (own_bundle / "manifest.json").read_bytes() == before
    Bundle.open(own_bundle).verify_files()
