"""Graphs as TensorRT 8 reads them, and the builder held to the names that each release has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.exporter import export
from planforge.exporter.axis_lengths import compute_length
from planforge.exporter.errors import BuildError, OutputError
from planforge.exporter.linting.lint import lint
from planforge.exporter.tensorrt import build, builder
from planforge.exporter.tensorrt.memory import estimate_memory
from planforge.exporter.tensorrt.older import rewrite_for_tensorrt_8
from planforge.exporter.tensorrt.profiles import Profile, derive_profiles
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact, Axis, Plan, TensorSpec

from ...helpers.machines import Driver
from ...helpers.tensorrt_surface import limited

V8_5 = (8, 5)
V8_6 = (8, 6)


def rewritten(model: onnx.ModelProto, version: tuple[int, int]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    rewrite_for_tensorrt_8(copy, version)
    onnx.checker.check_model(copy, full_check=True)
    return copy


def outputs(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run(None, feeds)]


GELU = "(float[n,8] x) => (float[n,8] y) { [g] y = Gelu%s (x) }"
NORM = (
    "(float[n,8] x) => (float[n,8] y) <float[8] s = {1,2,3,4,5,6,7,8}, float[8] b = {8,7,6,5,4,3,2,1}>"
    " { [ln] y = LayerNormalization<axis=-1, epsilon=0.01>(x, s, b) }"
)
REDUCTION = "(float[n,8] x) => (float[n,1] y) <int64[1] axes = {-1}> { [r] y = %s<keepdims=1>(x, axes) }"
SPLIT = "(float[n,8] x) => (float[n,4] y, float[n,4] z) { [sp] y, z = Split<axis=1, num_outputs=2>(x) }"
GRAPHS = {
    "gelu": GELU % "",
    "gelu tanh": GELU % '<approximate="tanh">',
    "layer norm": NORM,
    "split": SPLIT,
    **{name: REDUCTION % name for name in ("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean")},
}


def parsed(body: str, opset: int = 20) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\ng {body}')
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.parametrize("version", [V8_5, V8_6])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_rewritten_operator_computes_the_same(name: str, version: tuple[int, int]) -> None:
    model = parsed(GRAPHS[name])
    older = rewritten(model, version)
    assert older.opset_import[0].version == 17
    kept = {"LayerNormalization"} if version == V8_6 else set()
    operators = {node.op_type for node in older.graph.node}
    assert not operators & ({"Gelu", "LayerNormalization"} - kept)
    assert lint_errors(older, version) == []
    x = np.random.default_rng(0).normal(0, 3, (5, 8)).astype(np.float32)
    for found, expected in zip(outputs(older, {"x": x}), outputs(model, {"x": x}), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)


def lint_errors(model: onnx.ModelProto, version: tuple[int, int]) -> list[str]:
    """What the linter says of the operators, by its tables of TensorRT's documentation."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "g.onnx")
        onnx.save(model, path)
        report = lint(path, targets=[f"tensorrt{version[0]}.{version[1]}"])
    return [finding.what for finding in report.findings if finding.severity == "error"]


def test_an_operator_without_an_older_form_is_named() -> None:
    model = parsed("(float[4] x, float[4] w) => (bool[4] y) { [inf] z = IsInf(x) \n y = Not(z) }")
    with pytest.raises(BuildError, match=r"'inf' \(IsInf\) is of opset 20; TensorRT 8\.6 supports 17"):
        rewrite_for_tensorrt_8(model, V8_6)


def test_axes_that_are_computed_are_named() -> None:
    model = parsed("(float[n,8] x, int64[1] a) => (float[n,1] y) { [r] y = ReduceL2<keepdims=1>(x, a) }", 18)
    with pytest.raises(BuildError, match=r"'r' \(ReduceL2\): its axes 'a' are not a constant"):
        rewrite_for_tensorrt_8(model, V8_6)


def test_an_encoder_that_normalizes_computes_the_same_at_opset_17(tmp_path: Path) -> None:
    manifest = export("bert-demo", tmp_path / "B", precision="fp32", target="portable", verify=False).manifest
    (artifact,) = manifest.artifacts
    model = onnx.load(tmp_path / "B" / artifact.file)
    assert "ReduceL2" in {node.op_type for node in model.graph.node}
    ids = np.random.default_rng(2).integers(0, 1000, (2, 7))
    known = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    feeds = {value.name: known[value.name] for value in model.graph.input}
    for version in (V8_5, V8_6):
        older = rewritten(model, version)
        for found, expected in zip(outputs(older, feeds), outputs(model, feeds), strict=True):
            np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("version", [V8_5, V8_6])
def test_the_demo_computes_the_same_at_opset_17(version: tuple[int, int], demo_bundle: Path) -> None:
    artifact = Bundle.open(demo_bundle).manifest.artifact("decoder.portable.fp16")
    model = onnx.load(demo_bundle / artifact.file)
    older = rewritten(model, version)
    lengths = {"batch": 2, "tokens": 3, "past": 5, "total": 8, "rows": 4}
    rng = np.random.default_rng(1)
    feeds: dict[str, Any] = {}
    for spec in artifact.inputs:
        shape = [axis if isinstance(axis, int) else lengths[axis] for axis in spec.axis_names()]
        values = rng.normal(size=shape) if spec.dtype == "float16" else rng.integers(0, 5, shape)
        feeds[spec.name] = np.ones(shape, np.int64) if spec.role == "mask" else values.astype(spec.dtype)
    for found, expected in zip(outputs(older, feeds), outputs(model, feeds), strict=True):
        np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), atol=0.02)
    with_errors = [text for text in lint_errors(older, version) if "opset" in text or "operator" in text]
    assert with_errors == []


# The builder, version by version


BATCH = Axis("batch", 1, 1, 3)
X = TensorSpec("x", "x", "float16", (BATCH, 8))
IDS = TensorSpec("ids", "ids", "int64", (BATCH,))
Y = TensorSpec("y", "y", "float32", (BATCH, 8))
TABLE = ",".join(["0.5"] * 32)
MIXED = (
    f"(float16[batch,8] x, int64[batch] ids) => (float[batch,8] y) <float[4,8] table = {{{TABLE}}}>"
    " { [take] f = Gather(table, ids) \n [half] e = Cast<to=10>(f) \n [plus] s = Add(x, e) \n"
    " [act] g = Gelu(s) \n [up] w = Cast<to=1>(g) \n [soft] y = Softmax<axis=-1>(w) }"
)


Built = Callable[..., tuple[Any, Plan]]


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """Builds a small mixed graph with the names of one release."""
    import tensorrt_rtx

    def run(version: str, release: tuple[int, int] | None = None, **options: Any) -> tuple[Any, Plan]:
        trt = limited(tensorrt_rtx, version)
        monkeypatch.setitem(sys.modules, "tensorrt", trt)
        monkeypatch.setattr("ctypes.CDLL", lambda name: Driver(cuda=12020))
        monkeypatch.setattr(build, "build_in_child", builder.build_in_this_process)
        path = tmp_path / "g.onnx"
        path.write_bytes(parsed(MIXED).SerializeToString())
        artifact = Artifact("g", "portable", "fp16", 20, "onnx/g.onnx", (), "left", (X, IDS), (Y,))
        plan = build.build_plan(
            build.PlanRequest(
                path,
                artifact,
                [Profile("all", {"batch": (1, 1, 3)})],
                tmp_path / "g.plan",
                engine="tensorrt",
                options=build.Options(**options),
                release=release,
            )
        )
        return trt, plan

    return run


@pytest.mark.parametrize("version", ["10.3", "10.16", "11.1"])
def test_newer_releases_take_the_graphs_types(version: str, built: Built) -> None:
    trt, plan = built(version)
    assert (plan.sms, plan.cuda) == (("sm87",), "12.0")
    assert not any(name in ("precision", "set_output_type") for _, name, _ in trt.calls)
    kind = int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert ("Builder", "create_network", (1 << kind,)) in trt.calls


def test_8_6_is_told_every_type(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    # The parser behind the names is newer: it keeps integers of 64 bits, which 8.6 does not have.
    monkeypatch.setattr(builder, "use_int32_inputs", lambda artifact: artifact)
    trt, plan = built("8.6")
    assert plan.version.startswith("8.6")
    called = {(owner, name) for owner, name, _ in trt.calls}
    assert ("IBuilderConfig", "set_flag", (trt.BuilderFlag.FP16,)) in trt.calls
    assert ("IBuilderConfig", "set_flag", (trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS,)) in trt.calls
    explicit = int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    assert ("Builder", "create_network", (1 << explicit,)) in trt.calls
    told = [args[0] for _, name, args in trt.calls if name == "precision"]
    assert {trt.DataType.FLOAT, trt.DataType.HALF} == set(told)
    assert ("Builder", "build_serialized_network") in called


def test_integers_are_of_32_bits_in_8_6() -> None:
    artifact = Artifact("g", "portable", "fp16", 20, "onnx/g.onnx", (), "left", (X, IDS), (Y,))
    assert [spec.dtype for spec in builder.use_int32_inputs(artifact).inputs] == ["float16", "int32"]


def test_options_reach_the_builder(built: Built) -> None:
    trt, _ = built("10.16", workspace=2**30)
    assert ("IBuilderConfig", "set_memory_pool_limit", (trt.MemoryPoolType.WORKSPACE, 2**30)) in trt.calls
    config = trt.Builder(trt.Logger()).create_builder_config()
    builder.set_options(trt, config, {"compatible": True})
    assert ("IBuilderConfig", "set_flag", (trt.BuilderFlag.VERSION_COMPATIBLE,)) in trt.calls
    level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    assert ("IBuilderConfig", "hardware_compatibility_level", (level,)) in trt.calls


def test_an_option_that_a_release_has_not() -> None:
    import tensorrt_rtx

    trt = limited(tensorrt_rtx, "8.5")
    config = trt.Builder(trt.Logger()).create_builder_config()
    with pytest.raises(BuildError, match=r"tensorrt 8\.5\.\d+ is too old for --compatible"):
        builder.set_options(trt, config, {"compatible": True})


class Config:
    """An `IBuilderConfig` of one GPU; the real one of TensorRT-RTX has no timings."""

    content = b""

    def clear_flag(self, flag: object) -> None:
        pass

    def create_timing_cache(self, content: bytes) -> bytes:
        return content

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.content = cache or b"this GPU:"
        return self.content.startswith(b"this GPU")

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: self.content + b" 1 kernel")


def test_timings_are_kept_for_the_next_build(tmp_path: Path) -> None:
    trt = SimpleNamespace(BuilderFlag=SimpleNamespace(TF32=0))
    path = tmp_path / "timings"
    for count in (1, 2):
        config = Config()
        builder.set_options(trt, config, {"timing_cache": str(path)})
        builder.keep_timings(config, str(path))
        assert path.read_bytes() == b"this GPU:" + b" 1 kernel" * count
    path.write_bytes(b"another GPU")
    with pytest.raises(BuildError, match="is of another GPU or version of TensorRT; name a new file"):
        builder.set_options(trt, Config(), {"timing_cache": str(path)})
    with pytest.raises(BuildError, match="cannot be read: Is a directory"):
        builder.set_options(trt, Config(), {"timing_cache": str(tmp_path)})
    with pytest.raises(OutputError, match="cannot write the timing cache"):
        builder.keep_timings(Config(), str(tmp_path / "no" / "folder"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timing_cache": "x"}, "leave out --timing-cache"),
        ({"compatible": True}, "leave out --compatible, and choose the GPUs with --sm"),
    ],
)
def test_what_tensorrt_rtx_has_not(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=message):
        build.check_build_options("tensorrt-rtx", build.Options(**options))


@pytest.mark.parametrize(("release", "installed"), [((8, 6), "10.3"), ((10, 3), "11.1"), ((11, 2), "10.16")])
def test_a_target_of_another_major_version(release: tuple[int, int], installed: str, built: Built) -> None:
    words = rf"for TensorRT {release[0]}, but {installed}[.0]* is installed; use --target tensorrt"
    with pytest.raises(BuildError, match=words):
        built(installed, release)


# Memory


def test_the_estimate_counts_what_is_written_in_place_once(demo_bundle: Path) -> None:
    manifest = Bundle.open(demo_bundle).manifest
    artifact = manifest.artifact("decoder.inplace.fp16")
    profiles = derive_profiles(artifact, max_batch=2, max_length=64)
    found = dict(
        zip(
            [profile.name for profile in profiles],
            estimate_memory(demo_bundle / artifact.file, artifact, profiles),
            strict=True,
        )
    )
    config = manifest.config
    heads = config["n_head"]
    width = config["n_embd"]
    cache = 2 * config["n_layer"] * 2 * heads * 64 * (width // heads) * 2  # k and v, 2 rows, 64 slots, fp16
    logits = 2 * config["vocab_size"] * 4
    assert found["decode"]["weights"] == manifest.count_weight_bytes(artifact)
    assert found["decode"]["tensors"] == cache + logits + 2 * 8 + 2 * 4 + 2 * 8  # ids, lengths, rows
    # The two largest results of a step of 64 tokens: the feed-forward part's before and after its activation.
    assert found["prefill"]["between"] >= 2 * (2 * 64 * 4 * width * 2)
    assert found["decode"]["between"] < found["prefill"]["between"]


NAMES = {"batch": 3, "tokens": 5, "past": 7}


@settings(deadline=None)
@given(
    st.recursive(
        st.sampled_from([*NAMES, "2", "11"]),
        lambda e: st.tuples(e, st.sampled_from(["+", "-", "*", "//"]), e),
    )
)
def test_lengths_are_computed_as_python_does(tree: Any) -> None:
    def text(node: Any) -> str:
        return node if isinstance(node, str) else f"({text(node[0])}{node[1]}{text(node[2])})"

    try:
        expected = eval(text(tree), {}, dict(NAMES))
    except ZeroDivisionError:
        expected = None
    assert compute_length(text(tree), NAMES) == expected


@settings(deadline=None)
@given(st.text())
def test_other_names_of_axes_count_nothing_and_raise_nothing(text: str) -> None:
    assert compute_length(text, {}) is None or text.strip()
