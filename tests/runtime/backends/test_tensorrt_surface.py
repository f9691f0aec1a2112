"""A module `tensorrt` with the names of a release, over the real tensorrt_rtx."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter.tensorrt import build, builder
from planforge.exporter.tensorrt.profiles import Profile
from planforge.runtime.backends.tensorrt_library import make_logger
from planforge.runtime.bundle.manifest import Artifact, Axis, TensorSpec

from ...helpers.machines import Driver
from ...helpers.tensorrt_surface import VERSIONS, Handle, Surface, limited

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="needs pip install 'planforge[tensorrt-rtx]'",
)
in_each = pytest.mark.parametrize("version", VERSIONS)


def tensorrt(version: str) -> Any:
    import tensorrt_rtx

    return limited(tensorrt_rtx, version)


# Names


@in_each
def test_its_names_are_the_release_s_and_no_others(version: str) -> None:
    import tensorrt_rtx

    surface = Surface(version)
    trt = tensorrt(version)
    assert trt.__version__ == surface.release and trt.__name__ == "tensorrt"
    for name in {*dir(tensorrt_rtx), *surface.classes, *surface.enums, *surface.functions}:
        if name[0] != "_" and "." not in name:
            assert hasattr(trt, name) == surface.has(name), name
    for name in surface.enums.keys() - {"ILogger.Severity"}:
        real = getattr(tensorrt_rtx, name, None)
        for member in {*surface.enums[name], *(real.__members__ if real else ())}:
            assert hasattr(getattr(trt, name), member) == surface.has(f"{name}.{member}"), (name, member)
    for name in surface.classes.keys() - {"IHostMemory"}:
        public = {part for part in surface.attributes(name) if part[0] != "_"}
        real = getattr(tensorrt_rtx, name, None)
        for part in {part for part in dir(real) if part[0] != "_"} - {"Severity"}:
            assert hasattr(getattr(trt, name), part) == (part in public), (name, part)


def test_a_name_that_a_release_lacks() -> None:
    trt = tensorrt("10.3")
    config = trt.Builder(trt.Logger()).create_builder_config()
    with pytest.raises(AttributeError, match=r"^module 'tensorrt' has no attribute 'IStreamWriter'$"):
        trt.IStreamWriter  # noqa: B018
    with pytest.raises(
        AttributeError,
        match=r"^'tensorrt\.IBuilderConfig' object has no attribute 'num_compute_capabilities'",
    ):
        config.num_compute_capabilities = 1
    with pytest.raises(AttributeError, match=r"^'tensorrt\.IBuilderConfig' object has no attribute 'x'"):
        config.x  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"^type object 'tensorrt\.BuilderFlag' has no attribute 'REQUIRE_USER_ALLO"
    ):
        trt.BuilderFlag.REQUIRE_USER_ALLOCATION  # noqa: B018
    with pytest.raises(TypeError, match=r"tensorrt\.IBuilderConfig: No constructor defined!"):
        trt.IBuilderConfig()


# What a release has and the real module lacks


@pytest.mark.parametrize("version", ["8.5", "8.6"])
def test_a_weakly_typed_release_records_its_flags(version: str) -> None:
    trt = tensorrt(version)
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    flag = trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH
    assert (flag.name, int(flag), 1 << int(flag)) == ("EXPLICIT_BATCH", 0, 1)
    network = builder.create_network(1 << int(flag))
    config = builder.create_builder_config()
    config.set_flag(trt.BuilderFlag.FP16)
    config.clear_flag(trt.BuilderFlag.TF32)
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 1 << 30)
    layer = network.add_identity(network.add_input("x", trt.float32, (2, 3)))
    layer.precision = trt.float16
    layer.set_output_type(0, trt.float16)
    assert layer.precision == trt.float16
    assert trt.calls[1:4] == [
        ("Builder", "create_network", (1,)),
        ("Builder", "create_builder_config", ()),
        ("IBuilderConfig", "set_flag", (trt.BuilderFlag.FP16,)),
    ]
    assert trt.calls[-2:] == [
        ("ILayer", "precision", (trt.float16,)),
        ("ILayer", "set_output_type", (0, trt.float16)),
    ]
    assert config._real.flags & 1 << int(trt.BuilderFlag.TF32) == 0  # shared names reach the real object
    assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 1 << 30
    network.mark_output(layer.get_output(0))
    plan = builder.build_serialized_network(network, config)
    assert bytes(plan)[:4] == b"vtrt" and plan.nbytes > 1000


def test_enums_keep_their_numbers_and_compare() -> None:
    trt = tensorrt("8.6")
    surface = Surface("8.6")
    assert surface.numbers["BuilderFlag"]["kFP16"] == int(trt.BuilderFlag.FP16) == 0
    assert int(trt.BuilderFlag.INT8) == 1
    assert trt.BuilderFlag.FP16 != trt.BuilderFlag.INT8
    assert trt.BuilderFlag.FP16 == tensorrt("8.6").BuilderFlag.FP16
    assert isinstance(trt.BuilderFlag.FP16, trt.BuilderFlag) and isinstance(trt.float32, trt.DataType)
    assert not isinstance(trt.BuilderFlag.FP16, trt.DataType)
    assert trt.DataType(int(trt.float16)) == trt.DataType.HALF
    assert not hasattr(trt.DataType, "INT64")


# Objects of the real module


def test_objects_go_in_and_out_of_real_calls() -> None:
    trt = tensorrt("10.16")
    builder = trt.Builder(trt.Logger())
    network = builder.create_network(0)
    a, b = (network.add_input(name, trt.float32, (2, 3)) for name in "ab")
    layer = network.add_concatenation([a, b])
    assert isinstance(layer, Handle) and isinstance(layer, trt.ILayer)
    assert isinstance(layer, trt.IConcatenationLayer) and not isinstance(layer, trt.ISoftMaxLayer)
    assert (layer.type, layer.type.name, layer.num_inputs) == (
        trt.LayerType.CONCATENATION,
        "CONCATENATION",
        2,
    )
    assert layer.get_input(1) == b != a and layer.get_input(1).name == "b"
    assert tuple(layer.get_output(0).shape) == (4, 3)
    base = network.get_layer(0)
    base.__class__ = trt.IConcatenationLayer
    base.axis = 1
    assert tuple(layer.get_output(0).shape) == (2, 6)
    profile = builder.create_optimization_profile()
    profile.set_shape("a", (1, 2), (2, 2), (3, 2))
    assert [tuple(shape) for shape in profile.get_shape("a")] == [(1, 2), (2, 2), (3, 2)]
    assert [network.get_input(i).name for i in range(network.num_inputs)] == ["a", "b"]
    assert trt.calls[2:4] == [
        ("INetworkDefinition", "add_input", ("a", trt.float32, (2, 3))),
        ("INetworkDefinition", "add_input", ("b", trt.float32, (2, 3))),
    ]
    assert ("INetworkDefinition", "add_concatenation", (["ITensor", "ITensor"],)) in trt.calls


def test_a_logger_that_is_derived_hears_the_real_messages() -> None:
    trt = tensorrt("10.16")
    log = make_logger(trt)
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    assert not parser.parse(b"no onnx", "g.onnx")
    assert any("Failed to parse the ONNX model" in message for message in log.errors)
    assert parser.num_errors > 0 and parser.get_error(0).code() == trt.ErrorCode.MODEL_DESERIALIZE_FAILED


# The builder's code

BATCH = Axis("batch", 1, 1, 3)
TOKENS = Axis("tokens", 1, 1, 16)
QUERY = TensorSpec("q", "q", "float16", (BATCH, 4, TOKENS, 8))
KEY, VALUE = (TensorSpec(name, name, "float16", (BATCH, 4, 16, 8)) for name in "kv")
X, Y = (TensorSpec(name, name, "float16", (BATCH, 4)) for name in "xy")
RELU = (17, "(float16[batch,4] x) => (float16[batch,4] y) { y = Relu(x) }", (X,), Y)
ATTENTION = (
    23,
    "(float16[batch,4,tokens,8] q, float16[batch,4,16,8] k, float16[batch,4,16,8] v)"
    " => (float16[batch,4,tokens,8] y) { y = Attention<scale=1.0>(q, k, v) }",
    (QUERY, KEY, VALUE),
    TensorSpec("y", "y", "float16", QUERY.axes),
)


@pytest.mark.parametrize(
    ("version", "graph", "streamed"),
    [
        ("10.3", RELU, False),
        ("10.16", RELU, True),
        ("11.1", RELU, True),
        ("10.16", ATTENTION, True),
        ("11.1", ATTENTION, True),
    ],
)
def test_the_builder_builds_with_the_names_of_a_release(
    version: str,
    graph: Any,
    streamed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import onnx.parser

    opset, body, inputs, output = graph
    path = tmp_path / "g.onnx"
    text = f'<ir_version: 10, opset_import: ["" : {opset}]>\ng {body}'
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    artifact = Artifact("g", "portable", "fp16", opset, "onnx/g.onnx", (), "left", inputs, (output,))
    axes = {a.name: a for spec in inputs for a in spec.axes if isinstance(a, Axis)}
    profile = Profile("all", {name: (a.min, a.opt, a.max) for name, a in axes.items()})

    trt = tensorrt(version)
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver())
    monkeypatch.setattr(build, "build_in_child", builder.build_in_this_process)
    plan = build.build_plan(build.PlanRequest(path, artifact, [profile], tmp_path / "g.plan", "tensorrt"))
    assert (plan.version, plan.sms) == (trt.__version__, ("sm87",))
    assert build.logger.name not in {record.name for record in caplog.records}  # no warnings
    assert (tmp_path / "g.plan").read_bytes()[:4] == b"vtrt"
    called = {(owner, name) for owner, name, _ in trt.calls}
    assert ("IBuilderConfig", "clear_flag", (trt.BuilderFlag.TF32,)) in trt.calls
    assert (("Builder", "build_serialized_network_to_stream") in called) is streamed
    assert (("Builder", "build_serialized_network") in called) is not streamed
    assert (("IAttention", "decomposable", (True,)) in trt.calls) is (graph is ATTENTION)
