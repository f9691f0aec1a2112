"""Options of a build, with TensorRT-RTX as the judge of what reaches it."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter import export, exporting
from planforge.exporter.errors import BuildError, BuildOptionError
from planforge.exporter.options import parse_request
from planforge.exporter.tensorrt import build, builder
from planforge.exporter.tensorrt.plans import plan_profiles
from planforge.exporter.tensorrt.profiles import derive_profiles
from planforge.runtime.backends.tensorrt_library import make_logger
from planforge.runtime.bundle.manifest import Artifact, Axis, Plan, TensorSpec
from planforge.runtime.errors import InputError

from ...helpers.tensorrt_surface import limited

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="needs pip install 'planforge[tensorrt-rtx]'",
)

AXES = (Axis("batch", 1, 4, 8), Axis("tokens", 1, 32, 64))
IDS = TensorSpec("x", "ids", "float32", AXES)
ENCODER = Artifact(
    "encoder", "portable", "fp32", 20, "onnx/g.onnx", (), "left", (IDS,), (replace(IDS, name="y"),)
)
GRAPH = "(float[batch,tokens] x) => (float[batch,tokens] y) { [soft] y = Softmax<axis=-1>(x) }"


def build_encoder(folder: Path, *shapes: dict[str, int], **options: Any) -> Plan:
    """Builds a plan of an encoder of one operator."""
    import onnx.parser

    path = folder / "g.onnx"
    text = f'<ir_version: 10, opset_import: ["" : 20]>\ng {GRAPH}'
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    profiles = derive_profiles(ENCODER, opt=shapes)
    made = build.Options(opt=shapes, **options)
    request = build.PlanRequest(path, ENCODER, profiles, folder / "g.plan", sms=["sm86"], options=made)
    return build.build_plan(request)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build without a child process, which takes seconds to start."""
    monkeypatch.setattr(build, "build_in_child", builder.build_in_this_process)


@pytest.mark.usefixtures("in_this_process")
def test_tensorrt_has_the_shapes_that_were_asked_for(tmp_path: Path) -> None:
    plan = build_encoder(tmp_path, {"batch": 8, "length": 64}, {"batch": 1, "length": 5})
    # As TensorRT's own profiles say, see `builder.add_profile`.
    assert [profile["axes"] for profile in plan.profiles] == [
        {"batch": [1, 8, 8], "tokens": [1, 64, 64]},
        {"batch": [1, 1, 8], "tokens": [1, 5, 64]},
    ]
    assert b"[profile 1]" in (tmp_path / "g.plan").read_bytes()  # which TensorRT calls its tensors there
    build_encoder(tmp_path, {"batch": 8})
    assert b"[profile 1]" not in (tmp_path / "g.plan").read_bytes()


def test_a_builder_gets_its_level_and_what_to_keep_of_layers() -> None:
    import tensorrt_rtx as trt

    config = trt.Builder(make_logger(trt)).create_builder_config()
    usual = (config.builder_optimization_level, config.profiling_verbosity)
    builder.set_options(trt, config, {})
    assert (config.builder_optimization_level, config.profiling_verbosity) == usual
    for level in build.BUILDER_LEVELS:
        builder.set_options(trt, config, {"builder_level": level})
        assert config.builder_optimization_level == level
    for name in build.PROFILING:
        builder.set_options(trt, config, {"profiling": name})
        assert config.profiling_verbosity == getattr(trt.ProfilingVerbosity, name.upper())
    assert {name.upper() for name in build.PROFILING} == set(trt.ProfilingVerbosity.__members__)


@pytest.mark.usefixtures("in_this_process")
def test_a_plan_and_its_entry_keep_what_was_asked_of_its_layers(tmp_path: Path) -> None:
    contents = {}
    for profiling in (None, *build.PROFILING):
        plan = build_encoder(tmp_path, {}, profiling=profiling, builder_level=0)
        assert (plan.profiling, plan.builder_level) == (profiling, 0)
        assert Plan.from_json(plan.to_json()) == plan
        contents[profiling] = (tmp_path / "g.plan").read_bytes()
    assert contents[None] == contents["layer_names_only"]
    assert len(set(contents.values())) == 3
    assert not {"profiling", "builder_level"} & set(build_encoder(tmp_path, {}).to_json())


@pytest.mark.usefixtures("in_this_process")
def test_tensorrt_rtx_builds_the_same_plan_at_every_level(tmp_path: Path) -> None:
    """As docs/deploy/rtx.md says."""
    contents = set()
    for level in (None, *build.BUILDER_LEVELS):
        build_encoder(tmp_path, {}, builder_level=level)
        contents.add((tmp_path / "g.plan").read_bytes())
    assert len(contents) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"builder_level": 6}, "--builder-level 6 is not one of 0, 1, 2, 3, 4, 5$"),
        ({"builder_level": -1}, "--builder-level -1 is not one of 0"),
        ({"builder_level": True}, "--builder-level True is not one of 0"),
        ({"profiling": "detail"}, "is not one of layer_names_only, none, detailed; did you mean 'detailed'"),
    ],
)
def test_values_that_an_option_cannot_have(options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(BuildOptionError, match=message):
        build_encoder(tmp_path, {}, **options)
    with pytest.raises(BuildOptionError, match=message):
        parse_request(tmp_path / "B", options | {"target": ["cpu", "rtx"]})
    assert not (tmp_path / "g.plan").exists()


def test_a_release_without_levels_is_named() -> None:
    import tensorrt_rtx

    trt = limited(tensorrt_rtx, "8.5")
    config = trt.Builder(trt.Logger()).create_builder_config()
    with pytest.raises(BuildError, match=r"tensorrt 8\.5\.\d+ is too old for --builder-level"):
        builder.set_options(trt, config, {"builder_level": 3})
    builder.set_options(trt, config, {"profiling": "detailed"})
    assert config.profiling_verbosity == trt.ProfilingVerbosity.DETAILED


def test_an_axis_that_there_is_not() -> None:
    with pytest.raises(InputError, match=r"--opt rows=\.\.\.: an axis is batch or length"):
        plan_profiles([ENCODER], {}, build.Options(opt=[{"batch": 1}, {"rows": 1}]))
    with pytest.raises(InputError, match=r"--max tokens=\.\.\.: an axis is batch or length"):
        plan_profiles([ENCODER], {"tokens": 8}, build.USUAL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt": [{"batch": 2, "length": 8}, {"batch": 1}]}, "--opt batch=2,length=8 --opt batch=1 is for"),
        ({"builder_level": 0}, "--builder-level 0 is for plans, and target cpu builds none"),
        ({"profiling": "none"}, "--profiling none is for plans"),
        ({"sms": ["sm86", "sm89"]}, "--sm sm86,sm89 is for plans"),
    ],
)
def test_options_of_plans_where_none_is_built(options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        parse_request(tmp_path / "B", options | {"target": ["cpu"]})


def test_an_export_gives_its_options_to_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[build.Options] = []

    def build_none(*arguments: Any) -> list[Plan]:
        given.append(arguments[-1])
        return []

    monkeypatch.setattr(exporting, "build_plans", build_none)
    options: Any = {"target": ["cpu", "rtx"], "verify": False, "builder_level": 0, "profiling": "detailed"}
    export("gpt2-demo", tmp_path / "B", opt=[{"batch": 2}], **options)
    assert given == [build.Options(opt=({"batch": 2},), builder_level=0, profiling="detailed")]

    monkeypatch.delattr(exporting, "start_trace")  # nothing is traced
    with pytest.raises(BuildOptionError, match="--opt batch=99 is outside of what the graph allows, 1 to 8"):
        export("gpt2-demo", tmp_path / "C", opt=[{"batch": 99}], **options)
    assert not (tmp_path / "C").exists()


def test_debug_shows_what_tensorrt_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    build_encoder(tmp_path, {})
    assert "[tensorrt_rtx]" not in capfd.readouterr().err
    caplog.set_level(logging.DEBUG, "planforge")
    build_encoder(tmp_path, {})
    told = capfd.readouterr().err
    assert "[tensorrt_rtx] [V] Parsing node: soft [Softmax]" in told and "[tensorrt_rtx] [I]" in told
