"""Plans that TensorRT-RTX builds without a GPU, and what it says when it cannot."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from planforge.exporter.errors import BuildError, OutputError
from planforge.exporter.tensorrt import build, builder
from planforge.exporter.tensorrt.profiles import Profile, derive_profiles
from planforge.runtime.backends.tensorrt_library import LIBRARIES
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact, Axis, Plan, TensorSpec
from planforge.runtime.errors import BackendUnavailableError

from ...helpers.machines import Driver
from ...helpers.patience import PATIENCE, wait_until

ALL_SMS = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="needs pip install 'planforge[tensorrt-rtx]'",
)


def graph_and_artifact(bundle: Path, dialect: str = "inplace") -> tuple[Path, Artifact]:
    artifact = Bundle.open(bundle).manifest.artifact(f"decoder.{dialect}.fp16")
    return bundle / artifact.file, artifact


# Plans


@needs_rtx
@pytest.mark.parametrize("dialect", ["inplace", "portable"])
def test_one_plan_for_six_gpus_without_a_gpu(
    dialect: str, demo_bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from importlib.metadata import version

    graph, artifact = graph_and_artifact(demo_bundle, dialect)
    profiles = derive_profiles(artifact, max_length=48)
    out = tmp_path / "decoder.plan"
    name = f"planforge {artifact.id} {'0123456789abcdef' * 4}"
    plan = build.build_plan(build.PlanRequest(graph, artifact, profiles, out, sms=ALL_SMS, name=name))
    assert out.read_bytes().count(name.encode()) == 1  # a plan keeps its network's name
    assert plan.sms == ALL_SMS
    assert build.logger.name not in {record.name for record in caplog.records}  # no warnings
    assert plan.version == version("tensorrt-rtx-cu13")
    assert [path.name for path in tmp_path.iterdir()] == ["decoder.plan"]
    assert plan.file == "plans/decoder.plan"
    assert Plan.from_json(plan.to_json()) == plan
    assert [Profile.from_json(value) for value in plan.profiles] == list(profiles)
    summary = build.summarize_plan(out)
    assert summary["bytes"] == out.stat().st_size
    assert (summary["engine"], summary["version"]) == ("tensorrt-rtx", plan.version)
    assert summary["magic"] == "vtrt" and summary["complete"]


@needs_rtx
def test_the_build_needs_no_torch_and_only_reads_the_bundle(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys; from planforge.exporter.tensorrt.builder import main; main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'planforge.models'} & set(sys.modules);"
        "sys.exit(', '.join(heavy) or None)"
    )
    monkeypatch.setattr(build, "CHILD", (sys.executable, "-c", code))
    before = {path: path.stat().st_mtime_ns for path in demo_bundle.rglob("*")}
    graph, artifact = graph_and_artifact(demo_bundle)
    profiles = derive_profiles(artifact)
    out = tmp_path / "x.plan"
    build.build_plan(build.PlanRequest(graph, artifact, profiles, out, sms=["SM86", "sm86"]))
    assert {path: path.stat().st_mtime_ns for path in demo_bundle.rglob("*")} == before


def test_a_plan_cut_short_and_a_file_that_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "x.plan"
    path.write_bytes(b"vtrt" + bytes(12) + (1000).to_bytes(8, "little") + bytes([1, 7, 1, 116]))
    assert build.summarize_plan(path)["version"] == "1.7.1.116"
    assert build.summarize_plan(path)["complete"] is False
    path.write_bytes(b"\xffabc")
    assert build.summarize_plan(path)["magic"] == "\\xffabc"
    assert "engine" not in build.summarize_plan(path)


# What cannot be built


BATCH = Axis("batch", 1, 1, 3)
X = TensorSpec("x", "x", "float32", (BATCH, 4))
Y = TensorSpec("y", "y", "float32", (BATCH, 4))


def simple_artifact(*inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = (Y,)) -> Artifact:
    return Artifact("g", "portable", "fp32", 24, "onnx/g.onnx", (), "left", inputs, outputs)


def write_graph(folder: Path, body: str) -> Path:
    import onnx.parser

    text = f'<ir_version: 10, opset_import: ["" : 24, "local" : 1]>\ng {body}'
    path = folder / "g.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    return path


def build_graph(folder: Path, body: str, artifact: Artifact) -> None:
    """Builds a graph written as ONNX text; its profile is the whole range of each axis."""
    axes = {a.name: a for spec in artifact.inputs for a in spec.axes if isinstance(a, Axis)}
    profile = Profile("all", {name: (a.min, a.opt, a.max) for name, a in axes.items()})
    graph = write_graph(folder, body)
    build.build_plan(build.PlanRequest(graph, artifact, [profile], folder / "g.plan", sms=["sm86"]))


QUANTIZE = "y, s, z = DynamicQuantizeLinear(x)"
HALF_X = replace(X, dtype="float16")
SLOTS = Axis("slots", 16, 16, 16)
UNFROZEN = TensorSpec("c", "past.0.key", "float32", (BATCH, 4, Axis("capacity", 16, 16, 16), 8))
CACHE = replace(UNFROZEN, axes=(BATCH, 4, SLOTS, 8))
UPDATE = TensorSpec("u", "u", "float32", (BATCH, 4, Axis("tokens", 1, 1, 16), 8))
AT = TensorSpec("w", "w", "int64", (BATCH,))
SCATTER = (
    "(float[batch,4,{0},8] c, float[batch,4,tokens,8] u, int64[batch] w) =>"
    ' (float[batch,4,{0},8] y) {{ [sc] y = TensorScatter<axis=-2, mode="linear">(c, u, w) }}'
)
UNBUILDABLE = {
    "unsupported operator": (
        f"(float[batch,4] x) => (uint8[batch,4] y) {{ [quant] {QUANTIZE} }}",
        simple_artifact(X),
        r"ONNX node 'quant' \(DynamicQuantizeLinear\): TensorRT has no such operator",
    ),
    "node without a name": (
        f"(float[batch,4] x) => (uint8[batch,4] y) {{ {QUANTIZE} }}",
        simple_artifact(X),
        r"ONNX node number 0 \(DynamicQuantizeLinear\)",
    ),
    "inside a function": (
        "(float[batch,4] x) => (uint8[batch,4] y) { [call] y = local.F(x) }\n"
        f'<domain: "local", opset_import: ["":24]> F (x) => (y) {{ [inner] {QUANTIZE} }}',
        simple_artifact(X),
        r"ONNX node 'inner' \(DynamicQuantizeLinear\) inside call \(F\)",
    ),
    "mixed types": (
        "(float16[batch,4] x, float[4] v) => (float16[batch,4] y) { [plus] y = Add(x, v) }",
        simple_artifact(HALF_X, TensorSpec("v", "v", "float32", (4,))),
        r"ONNX node 'plus' \(Add\): its inputs have the types Half and Float",
    ),
    "types of a norm": (
        "(float16[batch,4] x, float[4] v) => (float16[batch,4] y) { [ln] y = LayerNormalization(x, v) }",
        simple_artifact(HALF_X, TensorSpec("v", "v", "float32", (4,))),
        r"ONNX node 'ln' \(LayerNormalization\): its inputs have the types Half and Float",
    ),
    "found only while building": (
        "(float[batch,4] x) => (float[batch,4] y) { [mm] y = MatMul(x, x) }",
        simple_artifact(X),
        "TensorRT builds no plan: .*mm: attempt to multiply two matrices with mismatching dimen",
    ),
    "unread input": (
        "(float[batch,4] x, float[batch,4] v) => (float[batch,4] y) { [relu] y = Relu(x) }",
        simple_artifact(X, replace(X, name="v")),
        "input 'v' reaches no layer",
    ),
    "other type than the artifact's": (
        "(float16[batch,4] x) => (float16[batch,4] y) { y = Relu(x) }",
        simple_artifact(X),
        r"input 'x' is float16 \(-1, 4\), expected float32 \(-1, 4\); output 'y' is",
    ),
    "other names than the artifact's": (
        "(float[batch,4] x) => (float[batch,4] y) { y = Relu(x) }",
        simple_artifact(X, outputs=(replace(Y, name="logits"),)),
        "output 'logits' is missing; output 'y' is unknown",
    ),
    "slots not frozen": (
        SCATTER.format("capacity"),
        simple_artifact(UNFROZEN, UPDATE, AT, outputs=(replace(UNFROZEN, name="y"),)),
        r"ONNX node 'sc' \(TensorScatter\): the length of its cache is not a number",
    ),
    "update without an alias": (
        SCATTER.format("slots"),
        simple_artifact(CACHE, UPDATE, AT, outputs=(replace(CACHE, name="y"),)),
        "output 'y' is an update in place of 'c', expected of 'nothing'",
    ),
    "alias without an update": (
        "(float[batch,4] x) => (float[batch,4] y) { y = Relu(x) }",
        replace(simple_artifact(X), aliases={"y": "x"}),
        "output 'y' is an update in place of 'nothing', expected of 'x'",
    ),
    "profile against the graph": (
        "(float[p,4] x, float[t,4] u, float[s,4] m) =>"
        " (float[s,4] y) { c = Concat<axis=0>(x, u) \n [plus] y = Add(c, m) }",
        simple_artifact(
            *(TensorSpec(n, n, "float32", (Axis(n, 1, 1, 2), 4)) for n in "xum"),
            outputs=(replace(Y, axes=(Axis("m", 1, 1, 2), 4)),),
        ),
        "the MAX shapes of a profile contradict each other at ONNX node 'plus': .* 2 != 4",
    ),
}


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build without a child process, which takes seconds to start."""
    monkeypatch.setattr(build, "build_in_child", builder.build_in_this_process)


@needs_rtx
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("case", UNBUILDABLE)
def test_an_unbuildable_graph_says_where_and_why_on_one_line(case: str, tmp_path: Path) -> None:
    body, artifact, message = UNBUILDABLE[case]
    (tmp_path / "g.plan").write_text("the old plan")
    with pytest.raises(BuildError, match=message) as caught:
        build_graph(tmp_path, body, artifact)
    text = str(caught.value)
    assert "\n" not in text and "/_src/" not in text and "cudaError" not in text
    assert (tmp_path / "g.plan").read_text() == "the old plan"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.onnx", "g.plan"]


@needs_rtx
@pytest.mark.usefixtures("in_this_process")
def test_an_input_that_the_parser_drops(tmp_path: Path) -> None:
    query = TensorSpec("q", "q", "float32", (BATCH, 4, Axis("tokens", 1, 1, 16), 8))
    key = replace(query, name="k", axes=(BATCH, 4, 16, 8))
    inputs = (query, key, replace(key, name="v"), replace(AT, name="n"))
    body = (
        "(float[batch,4,tokens,8] q, float[batch,4,16,8] k, float[batch,4,16,8] v, int64[batch] n)"
        " => (float[batch,4,tokens,8] y) { [att] y = Attention<scale=1.0>(q, k, v, , , , n) }"
    )
    artifact = simple_artifact(*inputs, outputs=(replace(query, name="y"),))
    with pytest.raises(BuildError, match=r"'att' \(Attention\): .* ignores .*nonpad_kv_seqlen"):
        build_graph(tmp_path, body, artifact)


@needs_rtx
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("size", "message"),
    [(None, r"weights\.fp16-.*data is missing"), (1000, r"weights\.fp16-.*data is cut short at 1000")],
)
def test_weights_missing_or_cut_short(
    size: int | None, message: str, demo_bundle: Path, tmp_path: Path
) -> None:
    source, artifact = graph_and_artifact(demo_bundle)
    graph = shutil.copy(source, tmp_path)
    if size is not None:
        data = demo_bundle / artifact.data[0]
        (tmp_path / data.name).write_bytes(data.read_bytes()[:size])
    profiles = derive_profiles(artifact)
    request = build.PlanRequest(Path(graph), artifact, profiles, tmp_path / "x.plan", sms=["sm86"])
    with pytest.raises(BuildError, match=message):
        build.build_plan(request)


@needs_rtx
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("content", [None, b"no onnx file at all"])
def test_a_file_that_is_not_onnx(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "g.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BuildError, match=r"g\.onnx cannot be read as ONNX"):
        build_relu(path, tmp_path / "g.plan")


def build_relu(path: Path, out: Path, engine: str = "tensorrt-rtx", sms: tuple[str, ...] = ALL_SMS) -> Plan:
    profiles = [Profile("all", {"batch": (1, 1, 3)})]
    return build.build_plan(build.PlanRequest(path, simple_artifact(X), profiles, out, engine, sms))


RELU = "(float[batch,4] x) => (float[batch,4] y) { y = Relu(x) }"


@pytest.mark.parametrize(
    ("engine", "sms", "message"),
    [
        (
            "tensorrt-rtx",
            ("sm86", "sm87"),
            r"no plans for sm87 \(Jetson Orin\), only for sm75 \(RTX 20, T4\), .*sm121 \(.*\); for another",
        ),
        ("tensorrt-rtx", (), "needs the GPUs to build for: some of sm75"),
        ("cuda", ("sm86",), r"engine 'cuda' is not one of \['tensorrt', 'tensorrt-rtx'\]"),
    ],
)
def test_an_unknown_target(engine: str, sms: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=message):
        build_relu(tmp_path / "g.onnx", tmp_path / "g.plan", engine, sms)


@pytest.mark.parametrize("engine", ["tensorrt", "tensorrt-rtx"])
def test_an_engine_that_is_not_installed_names_the_extra_and_the_package(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = LIBRARIES[engine]
    monkeypatch.setitem(LIBRARIES, engine, replace(installed, module="not_installed_here"))
    with pytest.raises(BackendUnavailableError) as caught:
        build_relu(tmp_path / "g.onnx", tmp_path / "g.plan", engine, installed.sms)
    assert f"pip install 'planforge[{engine}]'" in str(caught.value)
    assert f"package {installed.package}:" in str(caught.value)


def test_tensorrt_older_than_8_5_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = type(sys)("tensorrt")
    monkeypatch.setattr(old, "__version__", "8.4.3.1", raising=False)
    monkeypatch.setitem(sys.modules, "tensorrt", old)
    with pytest.raises(BackendUnavailableError, match=r"tensorrt 8\.4\.3\.1 is older than 8\.5"):
        builder.import_engine("tensorrt")


def test_tensorrt_builds_for_the_present_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver("sm90", 13020))
    assert builder.find_gpu([]) == builder.find_gpu(["sm90"]) == (["sm90"], "13.0")
    with pytest.raises(BuildError, match="this machine's sm90 only, not sm86, sm90"):
        builder.find_gpu(["sm86", "sm90"])
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver(status=100))  # CUDA_ERROR_NO_DEVICE
    with pytest.raises(BackendUnavailableError, match="builds for this machine's GPU, and none"):
        builder.find_gpu([])


def test_a_tensorrt_that_cannot_stream_its_plan(tmp_path: Path) -> None:
    class Builder:
        def build_serialized_network(self, network: object, config: object) -> bytes:
            return b"plan"

    log = SimpleNamespace(errors=[], warnings=[])
    builder.write_plan(None, Builder(), None, None, tmp_path / "g.plan", log)
    assert (tmp_path / "g.plan").read_bytes() == b"plan"


# The child process


@needs_rtx
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os.abort()", "signal SIGABRT"),
        ("import os; os.kill(os.getpid(), 9)", r"signal SIGKILL \(out of memory\?\)"),
        ("raise ZeroDivisionError('why')", "exit code 1, its last words: ZeroDivisionError: why"),
        ("pass", "exit code 0"),
    ],
)
def test_a_child_that_dies_is_a_build_error(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "CHILD", (sys.executable, "-c", code))
    with pytest.raises(BuildError, match=f"tensorrt-rtx died while building .*{message}"):
        build_relu(tmp_path / "g.onnx", tmp_path / "g.plan")
    assert list(tmp_path.iterdir()) == []


@needs_rtx
def test_a_plan_that_cannot_be_written(tmp_path: Path) -> None:
    graph = write_graph(tmp_path, RELU)
    with pytest.raises(OutputError, match=r"cannot write the plan .*No such file"):
        build_relu(graph, tmp_path / "missing" / "g.plan")


@needs_rtx
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk(tmp_path: Path) -> None:
    graph = write_graph(tmp_path, RELU)
    (tmp_path / ".g.plan.partial").symlink_to("/dev/full")
    with pytest.raises(OutputError, match="No space left on device"):
        build_relu(graph, tmp_path / "g.plan")
    assert [path.name for path in tmp_path.iterdir()] == ["g.onnx"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_an_interrupt_takes_the_child_along(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = (
        "import os, pathlib, time;"
        f"path = pathlib.Path({str(pid_file)!r}); new = path.with_suffix('.new');"
        "new.write_text(str(os.getpid())); new.rename(path); time.sleep(300)"
    )
    parent = (
        "import signal, sys; from planforge.exporter.tensorrt import build;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a background job ignores it
        f"build.CHILD = (sys.executable, '-c', {child!r});"
        "build.build_in_child({'engine': 'tensorrt-rtx', 'onnx': 'g.onnx'})"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.DEVNULL)
    wait_until(pid_file.exists)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
