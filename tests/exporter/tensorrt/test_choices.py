"""What plans cannot be is refused at once, with the last reason first and what can be instead."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planforge.exporter import build
from planforge.exporter.checkpoints.checkpoint import Checkpoint
from planforge.exporter.checkpoints.source import resolve_source
from planforge.exporter.errors import BuildOptionError
from planforge.exporter.graphs import plan_artifacts
from planforge.exporter.linting.lint import lint
from planforge.exporter.options import parse_request
from planforge.exporter.precisions import PRECISIONS
from planforge.exporter.targets import TARGETS, find_target
from planforge.exporter.tensorrt import build as builds
from planforge.exporter.tensorrt import choices
from planforge.runtime.backends.tensorrt_library import LIBRARIES
from planforge.runtime.errors import BackendUnavailableError, InputError

from ...helpers.lint import Case, write_case
from ...helpers.paths import ROOT

EVERY = LIBRARIES["tensorrt-rtx"].sms
# The table of docs/quantize.md: the first TensorRT that takes each precision.
ROW = re.compile(r"^\| (\w+) \|.*\| from (\d+)\.(\d+) \|$", re.MULTILINE)
DOCUMENTED = {
    name: (int(major), int(minor))
    for name, major, minor in ROW.findall((ROOT / "docs/quantize.md").read_text(encoding="utf-8"))
}


def test_versions_are_refused_as_documented() -> None:
    assert set(DOCUMENTED) == {
        name for name, kind in PRECISIONS.items() if kind.quantizes_in_half and "portable" in kind.dialects
    }
    for name, first in DOCUMENTED.items():
        for target in TARGETS.values():
            assert bool(target.refuse_version(name)) == target.older_than(*first)


@pytest.mark.parametrize(("precision", "number"), [("w4a16", 22), ("nvfp4a16", 23)])
def test_lint_refuses_the_same_versions(precision: str, number: int, tmp_path: Path) -> None:
    kind = {22: "int4", 23: "float4e2m1"}[number]
    case = Case("four-bits", "", f"(float[2] x) => ({kind}[2] y) {{ y = Cast <to = {number}>(x) }}", 23)
    found = lint(write_case(case, tmp_path)).findings
    refused = {finding.target for finding in found if finding.rule == "type-unsupported"}
    assert refused == {name for name, target in TARGETS.items() if target.refuse_version(precision)}


def refuse_export(folder: Path, target: str, precision: Sequence[str], *sms: str) -> str:
    with pytest.raises((InputError, BackendUnavailableError)) as caught:
        parse_request(folder / "B", {"target": target.split(","), "precision": precision, "sms": sms or None})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("target", "precision", "words"),
    [
        ("jetpack6.2", "int4", "w4a16, .* needs TensorRT 10.9, not 10.3: take fp16 or w8a16 instead$"),
        ("jetpack6.2", "nvfp4", "nvfp4a16, .* needs TensorRT 10.15, not 10.3: take fp16 or w8a16 instead$"),
        ("jetpack6.2", "fp8", r"fp8a16 needs a GPU of sm89 .*, not sm87 \(Jetson Orin\): take fp16 or w8a16"),
        ("tensorrt8.5", "int4", "w4a16, .* needs TensorRT 10.9, not 8.5: take fp16 instead$"),
        ("jetpack5.1", "int4", "jetpack5.1 has TensorRT only for Python 3.8"),
    ],
)
def test_the_last_reason_comes_first(
    target: str,
    precision: str,
    words: str,
    tmp_path: Path,
    demo_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choices, "is_installed", lambda engine: engine != "tensorrt")
    assert re.search(words, refuse_export(tmp_path, target, [precision]))
    with pytest.raises((InputError, BackendUnavailableError), match=words):
        build(demo_bundle, target=target, precisions=[precision])


def test_a_board_is_advised_to_take_what_it_can_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "is_installed", lambda engine: engine != "tensorrt")
    told = refuse_export(tmp_path, "jetpack6.2", ["fp16", "int4", "nvfp4"])
    assert "export with --target cpu,portable --precision fp16, copy" in told
    told = refuse_export(tmp_path, "jetpack6.2,jetpack7.2", ["fp16", "int4"])
    assert "export with --target cpu,portable,rtx --precision fp16,w4a16, copy" in told


def test_the_versions_of_a_target_are_suggested() -> None:
    with pytest.raises(InputError, match=r"did you mean 'tensorrt8\.5' or 'tensorrt8\.6'\?$"):
        find_target("tensorrt8")


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything but the build itself think that TensorRT-RTX is there."""
    for module in (choices, builds):
        monkeypatch.setattr(module, "is_installed", lambda engine: True)


def test_a_gpu_without_kernels_is_told_what_it_has_kernels_for(
    demo_bundle: Path, tmp_path: Path, no_library: None
) -> None:
    """Before what the bundle lacks, as the way to get it would end there."""
    words = "has no kernels for fp8, which begin with sm89 (RTX 40, L4, L40S)"
    instead = "take fp16, w8a16 or w4a16 instead"
    assert refuse_export(tmp_path, "rtx", ["fp8"], "RTX 30").endswith(f"leave sm86 out, or {instead}")
    for sms in (["sm86"], ["sm86", "sm89"]):
        with pytest.raises(InputError, match=re.escape(f"--sm sm86 {words}")):
            build(demo_bundle, precisions=["fp8"], sms=sms)
    assert "w4a16" not in refuse_export(tmp_path, "rtx", ["fp8"], "sm75", "sm86")
    with pytest.raises(InputError, match="the bundle has no such graph"):
        build(demo_bundle, precisions=["fp8"], sms=["sm89"])


@pytest.mark.parametrize(
    ("sms", "instead"), [(("sm86", "sm120"), "sm120"), (("sm86",), "sm120,sm121"), (("sm86", "RTX 40"), None)]
)
def test_the_gpus_that_are_left_are_those_that_were_named(
    sms: Sequence[str],
    instead: str | None,
    no_library: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    unmet = {"nvfp4a16": {sm: "fp4" for sm in EVERY[:4]}}
    graphs: Any = [
        SimpleNamespace(id=f"decoder.inplace.{precision}", precision=precision, file=precision)
        for precision in ("fp16", "nvfp4a16")
    ]
    bundle: Any = SimpleNamespace(path=str)
    monkeypatch.setattr(choices, "find_plan_graphs", lambda bundle, dialect: graphs)
    monkeypatch.setattr(choices, "describe_unmet", lambda name, every: unmet.get(name, {}))
    caplog.set_level(logging.WARNING, "planforge")
    choices.warn_of_left_out(bundle, ["rtx"], sms)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("one precision gets no plan: --sm") and "take fp16, w8a16 or w4a16 there" in line
    assert line.endswith(f": --sm {instead or 'sm120,sm121'}")
    with pytest.raises(BuildOptionError, match="no kernels there for fp4"):
        choices.choose_architectures(bundle, graphs[1:], "rtx", sms)
    left = choices.choose_architectures(bundle, graphs[1:], "rtx", None)
    assert left.architectures == ("sm120", "sm121") and "no plan for sm75, sm80, sm86, sm89" in left.left_out


def test_int4_of_a_graph_for_every_engine_has_a_name_of_its_own() -> None:
    checkpoint = Checkpoint(resolve_source("gpt2-demo"))
    with pytest.raises(InputError, match=r", not int4; did you mean to add w4a16\?$"):
        plan_artifacts(checkpoint, ["cpu", "portable"], ["int4"])
    assert len(plan_artifacts(checkpoint, ["cpu", "portable"], ["int4", "w4a16"])) == 2


def test_a_model_of_gpu_is_understood_as_its_series(no_library: None) -> None:
    with pytest.raises(BuildOptionError, match=r"; did you mean RTX 30 \(sm86\)\?$"):
        builds.resolve_architectures("tensorrt-rtx", ["RTX 3060"])
