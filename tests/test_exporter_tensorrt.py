"""Profiles, and plans that TensorRT-RTX builds without a GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planforge.exporter import onnx_export
from planforge.exporter.errors import BuildError, OutputError
from planforge.exporter.graph_check import check_graph, name_axes
from planforge.exporter.passes.fp16 import ConvertToFp16
from planforge.exporter.passes.weights import AttachWeights, save_with_shared_weights
from planforge.exporter.recipes import Limits, Recipe, recipes_for
from planforge.exporter.tensorrt import build
from planforge.exporter.tensorrt.profiles import (
    Profile,
    check_profile,
    profiles_for,
    slots_of,
)
from planforge.models import GPT2, GPT2Config, save_model
from planforge.runtime.bundle.manifest import Artifact, Axis, Plan, TensorSpec
from planforge.runtime.errors import BackendUnavailableError

ALL_SMS = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
CONFIG = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=300, n_positions=64)
needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="needs pip install 'planforge[tensorrt-rtx]'",
)


def artifact_of(recipe: Recipe) -> Artifact:
    """What a bundle's manifest says of the recipe's fp16 graph."""

    def half(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(
            replace(s, dtype="float16") if s.role.startswith(("past.", "present.")) else s for s in specs
        )

    return Artifact(
        graph=recipe.graph,
        dialect=recipe.dialect,
        precision="fp16",
        opset=recipe.opset,
        file=f"onnx/decoder.{recipe.dialect}.fp16.onnx",
        data=("onnx/weights.fp16.data",),
        padding_side=recipe.padding_side,
        inputs=half(recipe.inputs),
        outputs=half(recipe.outputs),
        aliases=recipe.aliases,
        constraints=recipe.constraints,
    )


def gpt2_artifact(dialect: str, batch: int = 3, length: int = 64) -> Artifact:
    config = replace(CONFIG, n_positions=length)
    return artifact_of(recipes_for("gpt2", config, Limits(batch, length))[dialect])


@pytest.fixture(scope="session")
def tiny_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny GPT-2's fp16 graphs, decoder.DIALECT.fp16.onnx, and their weights."""
    folder = tmp_path_factory.mktemp("tiny")
    model = GPT2(CONFIG).requires_grad_(False)
    save_model(model, folder / "checkpoint")
    limits = Limits(3, CONFIG.n_positions)
    recipes = recipes_for("gpt2", CONFIG, limits)
    traces = {
        dialect: onnx_export.start_trace(folder / "checkpoint", dialect, limits, folder / f"{dialect}.onnx")
        for dialect in recipes
    }
    graphs = {}
    for dialect, process in traces.items():
        graph = onnx_export.finish_trace(process, folder / f"{dialect}.onnx")
        AttachWeights(dict(model.named_parameters(remove_duplicate=False)))(graph)
        name_axes(graph, recipes[dialect].outputs)
        check_graph(graph, recipes[dialect].inputs, recipes[dialect].outputs)
        ConvertToFp16(["logits"])(graph)
        graphs[f"decoder.{dialect}.fp16.onnx"] = graph
    save_with_shared_weights(graphs, folder, "weights.fp16.data")
    return folder


# Profiles

dialects = st.sampled_from(["inplace", "portable"])
lengths = st.integers(2, 3000)
batches = st.integers(1, 64)


@given(dialects, batches, lengths, st.data())
def test_profiles_are_in_order_within_the_axes_and_sum_up(
    dialect: str, batch: int, length: int, data: st.DataObject
) -> None:
    artifact = gpt2_artifact(dialect, batch, length)
    max_batch = data.draw(st.none() | st.integers(1, batch))
    max_length = data.draw(st.none() | st.integers(2, length))
    profiles = profiles_for(artifact, max_batch=max_batch, max_length=max_length)
    assert [p.name for p in profiles] == ["prefill", "append", "decode"]
    assert slots_of(profiles) == ((max_length or length) if dialect == "inplace" else None)
    for profile in profiles:
        check_profile(profile, artifact)
        for name, (low, opt, high) in profile.axes.items():
            assert low <= opt <= high
            axis = artifact.axis(name)
            # What is beyond the axis is the corner that no call reaches.
            corner = name == "total" and profile.name == "append"
            assert axis.min <= low and opt <= axis.max and (corner or high <= axis.max)
        if dialect == "portable":
            past, tokens, total = (profile.axes[a] for a in ("past", "tokens", "total"))
            assert total == tuple(p + t for p, t in zip(past, tokens, strict=True))
        for spec in artifact.inputs:
            assert all(len(shape) == len(spec.axes) for shape in profile.shapes(spec))


def fits(profile: Profile, **lengths: int) -> bool:
    return all(
        profile.axes[name][0] <= length <= profile.axes[name][2]
        for name, length in lengths.items()
        if name in profile.axes
    )


@given(dialects, batches, lengths, st.data())
def test_every_call_fits_its_profile(
    dialect: str, max_batch: int, max_length: int, data: st.DataObject
) -> None:
    prefill, append, decode = profiles_for(gpt2_artifact(dialect, max_batch, max_length))
    batch = data.draw(st.integers(1, max_batch))
    tokens = data.draw(st.integers(1, max_length))
    assert fits(prefill, batch=batch, tokens=tokens, rows=batch, past=0, total=tokens)
    part = data.draw(st.integers(1, append.axes["tokens"][2]))
    past = data.draw(st.integers(0, max_length - part))
    assert fits(append, batch=batch, tokens=part, rows=batch, past=past, total=past + part)
    assert fits(append, batch=1, tokens=part, rows=part, past=past, total=past + part)
    past = data.draw(st.integers(1, max_length - 1))
    assert fits(decode, batch=batch, tokens=1, rows=batch, past=past, total=past + 1)


def test_profiles_of_the_usual_shape() -> None:
    prefill, append, decode = profiles_for(gpt2_artifact("portable", 8, 1024))
    assert prefill.axes["tokens"] == (1, 128, 1024) and prefill.axes["past"] == (0, 0, 0)
    assert append.axes["tokens"] == (1, 128, 256) and append.axes["rows"] == (1, 128, 256)
    assert append.axes["total"] == (1, 256, 1279)
    assert decode.axes == {
        "batch": (1, 1, 8),
        "tokens": (1, 1, 1),
        "rows": (1, 1, 8),
        "past": (1, 128, 1023),
        "total": (2, 129, 1024),
    }
    assert Profile.from_json(append.to_json()) == append


def test_an_encoder_has_one_profile_over_all_its_axes() -> None:
    axes = (Axis("batch", 1, 1, 8), Axis("tokens", 1, 64, 512))
    encoder = simple_artifact(TensorSpec("input_ids", "ids", "int64", axes))
    (profile,) = profiles_for(encoder, max_length=128)
    assert profile.axes == {"batch": (1, 1, 8), "tokens": (1, 64, 128)}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0, but the graph allows 1..3"),
        ({"max_batch": 4}, "max_batch is 4, but the graph allows 1..3"),
        ({"max_length": 1}, "max_length is 1, but the graph allows 2..64"),
        ({"max_length": 65}, "max_length is 65, but the graph allows 2..64"),
    ],
)
def test_maxima_outside_the_graphs_range(limits: dict[str, int], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        profiles_for(gpt2_artifact("inplace"), **limits)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tokens": (4, 2, 8)}, r"'input_ids', axis 'tokens': \(4, 2, 8\) is not in the order"),
        ({"batch": (1, 1, 9)}, r"'input_ids', axis 'batch': \(1, 1, 9\) is not within .* 1..3"),
        ({"total": (1, 1, 64)}, r"'attention_mask', axis 'total'.* must be past \+ tokens"),
        ({"beams": (1, 1, 1)}, "has an axis 'beams'"),
    ],
)
def test_a_bad_profile_is_refused_by_input_axis_and_values(
    axes: dict[str, tuple[int, int, int]], message: str
) -> None:
    artifact = gpt2_artifact("portable")
    decode = profiles_for(artifact)[2]
    with pytest.raises(BuildError, match=message):
        check_profile(replace(decode, axes={**decode.axes, **axes}), artifact)
    with pytest.raises(BuildError, match="no lengths for axis 'batch' of input 'input_ids'"):
        check_profile(Profile("empty", {}), artifact)


def test_slots_have_one_length_in_a_plan() -> None:
    with pytest.raises(BuildError, match=r"'slots' must have one length .* \[8, 16\]"):
        slots_of([Profile("a", {"slots": (8, 8, 8)}), Profile("b", {"slots": (16, 16, 16)})])


# Plans


@needs_rtx
@pytest.mark.parametrize("dialect", ["inplace", "portable"])
def test_one_plan_for_six_gpus_without_a_gpu(dialect: str, tiny_graphs: Path, tmp_path: Path) -> None:
    from importlib.metadata import version

    artifact = gpt2_artifact(dialect)
    profiles = profiles_for(artifact, max_length=48)
    out = tmp_path / "decoder.plan"
    graph = tiny_graphs / f"decoder.{dialect}.fp16.onnx"
    report = build.build_plan(graph, artifact, sms=ALL_SMS, profiles=profiles, out=out)
    assert report.sms == ALL_SMS and report.warnings == ()
    assert report.version == version("tensorrt-rtx-cu13")
    assert [path.name for path in tmp_path.iterdir()] == ["decoder.plan"]
    passport = report.passport(artifact.id, "plans/decoder.plan")
    assert Plan.from_json(passport.to_json()) == passport
    assert [Profile.from_json(value) for value in passport.profiles] == list(profiles)
    summary = build.plan_summary(out)
    assert summary["bytes"] == report.bytes == out.stat().st_size
    assert (summary["engine"], summary["version"]) == ("tensorrt-rtx", report.version)
    assert summary["magic"] == "vtrt" and summary["complete"]


@needs_rtx
def test_the_build_needs_no_torch_and_only_reads_the_bundle(
    tiny_graphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys; from planforge.exporter.tensorrt.build import main; main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'planforge.models'} & set(sys.modules);"
        "sys.exit(', '.join(heavy) or None)"
    )
    monkeypatch.setattr(build, "CHILD", (sys.executable, "-c", code))
    before = {path.name: path.stat().st_mtime_ns for path in tiny_graphs.iterdir()}
    artifact = gpt2_artifact("inplace")
    build.build_plan(
        tiny_graphs / "decoder.inplace.fp16.onnx",
        artifact,
        sms=["SM86", "sm86"],
        profiles=profiles_for(artifact),
        out=tmp_path / "x.plan",
    )
    assert {path.name: path.stat().st_mtime_ns for path in tiny_graphs.iterdir()} == before


def test_a_plan_cut_short_and_a_file_that_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "x.plan"
    path.write_bytes(b"vtrt" + bytes(12) + (1000).to_bytes(8, "little") + bytes([1, 7, 1, 116]))
    assert build.plan_summary(path)["version"] == "1.7.1.116"
    assert build.plan_summary(path)["complete"] is False
    path.write_bytes(b"\xffabc")
    assert build.plan_summary(path)["magic"] == "\\xffabc"
    assert "engine" not in build.plan_summary(path)


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
    build.build_plan(
        write_graph(folder, body),
        artifact,
        sms=["sm86"],
        profiles=[profile],
        out=folder / "g.plan",
    )


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
        r"input 'x' is float16 \(-1, 4\), meant is float32 \(-1, 4\); output 'y' is",
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
        "output 'y' is an update in place of 'c', meant is of 'nothing'",
    ),
    "alias without an update": (
        "(float[batch,4] x) => (float[batch,4] y) { y = Relu(x) }",
        replace(simple_artifact(X), aliases={"y": "x"}),
        "output 'y' is an update in place of 'nothing', meant is of 'x'",
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


@needs_rtx
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
@pytest.mark.parametrize(
    ("size", "message"),
    [(None, "weights.fp16.data is missing"), (1000, "weights.fp16.data is cut short at 1000")],
)
def test_weights_missing_or_cut_short(
    size: int | None, message: str, tiny_graphs: Path, tmp_path: Path
) -> None:
    graph = shutil.copy(tiny_graphs / "decoder.inplace.fp16.onnx", tmp_path)
    if size is not None:
        data = (tiny_graphs / "weights.fp16.data").read_bytes()
        (tmp_path / "weights.fp16.data").write_bytes(data[:size])
    artifact = gpt2_artifact("inplace")
    with pytest.raises(BuildError, match=message):
        build.build_plan(
            Path(graph),
            artifact,
            sms=["sm86"],
            profiles=profiles_for(artifact),
            out=tmp_path / "x.plan",
        )


@needs_rtx
@pytest.mark.parametrize("content", [None, b"no onnx file at all"])
def test_a_file_that_is_not_onnx(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "g.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BuildError, match=r"g\.onnx cannot be read as ONNX"):
        build_relu(path, tmp_path / "g.plan")


def build_relu(
    path: Path, out: Path, engine: str = "tensorrt-rtx", sms: tuple[str, ...] = ALL_SMS
) -> build.PlanReport:
    profiles = [Profile("all", {"batch": (1, 1, 3)})]
    return build.build_plan(path, simple_artifact(X), engine=engine, sms=sms, profiles=profiles, out=out)


RELU = "(float[batch,4] x) => (float[batch,4] y) { y = Relu(x) }"


@pytest.mark.parametrize(
    ("engine", "sms", "message"),
    [
        (
            "tensorrt-rtx",
            ("sm86", "sm87"),
            r"no plans for sm87, only for sm75, .*sm121; for another",
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
    installed = build.ENGINES[engine]
    monkeypatch.setitem(build.ENGINES, engine, replace(installed, module="not_installed_here"))
    with pytest.raises(BackendUnavailableError) as caught:
        build_relu(tmp_path / "g.onnx", tmp_path / "g.plan", engine, installed.sms)
    assert f"pip install 'planforge[{engine}]'" in str(caught.value)
    assert f"package {installed.package}:" in str(caught.value)


def test_tensorrt_older_than_10_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = type(sys)("tensorrt")
    monkeypatch.setattr(old, "__version__", "8.6.2", raising=False)
    monkeypatch.setitem(sys.modules, "tensorrt", old)
    with pytest.raises(BackendUnavailableError, match=r"tensorrt 8\.6\.2 .* 10 or newer"):
        build.engine_module("tensorrt")


class Driver:
    """libcuda as far as `present_sm` asks it; an H200."""

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:  # noqa: N802
        value._obj.value = {75: 9, 76: 0}[attribute]
        return 0


def test_tensorrt_builds_for_the_present_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver())
    assert build.present_sm([]) == build.present_sm(["sm90"]) == "sm90"
    with pytest.raises(BuildError, match="this machine's sm90 only, not sm86, sm90"):
        build.present_sm(["sm86", "sm90"])
    monkeypatch.setattr(Driver, "cuInit", lambda self, flags: 100)  # CUDA_ERROR_NO_DEVICE
    with pytest.raises(BackendUnavailableError, match="builds for the GPU that is present"):
        build.present_sm([])


def test_a_tensorrt_that_cannot_stream_its_plan(tmp_path: Path) -> None:
    class Builder:
        def build_serialized_network(self, network: object, config: object) -> bytes:
            return b"plan"

    log = SimpleNamespace(errors=[], warnings=[])
    build.write_plan(None, Builder(), None, None, tmp_path / "g.plan", log)
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
        "new.write_text(str(os.getpid())); new.rename(path); time.sleep(60)"
    )
    parent = (
        "import sys; from planforge.exporter.tensorrt import build;"
        f"build.CHILD = (sys.executable, '-c', {child!r});"
        "build.answer_of_child({'engine': 'tensorrt-rtx', 'onnx': 'g.onnx'})"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not pid_file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
