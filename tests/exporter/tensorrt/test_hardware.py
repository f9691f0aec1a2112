"""What older GPUs have no kernel for is known before verification. TensorRT-RTX's builder is the judge."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest

from planforge.exporter import build, export, exporting
from planforge.exporter.errors import BuildError, BuildOptionError
from planforge.exporter.linting.lint import lint
from planforge.exporter.tensorrt import build as builds
from planforge.exporter.tensorrt import builder
from planforge.exporter.tensorrt.hardware import describe_unmet
from planforge.exporter.tensorrt.profiles import Profile
from planforge.runtime.backends.tensorrt_library import LIBRARIES
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.bundle.manifest import Artifact, Axis, TensorSpec

from ...helpers.lint import Case, write_case
from ...helpers.models import edit_weights, tiny_gpt2
from ...helpers.text import write_gpt2

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="needs pip install 'planforge[tensorrt-rtx]'",
)
SMS = LIBRARIES["tensorrt-rtx"].sms
W = f"<float[8,8] w = {{{','.join(map(str, range(64)))}}}>"
TWO = "(T[batch,8] x, T[8,8] z) => (T[batch,8] y)"
QKV = "(T[batch,2,4,8] x, T[batch,2,4,8] k, T[batch,2,4,8] v) => (T[batch,2,4,8] y)"
# What is refused on sm75, by a name; T stands for the element type.
REFUSED = {
    "matmul": ("float", f"{TWO} {{ y = MatMul(x, z) }}"),
    "matmul-of-a-weight": ("float", f"(T[batch,8] x) => (T[batch,8] y) {W} {{ y = MatMul(x, w) }}"),
    "gemm": ("float", f"{TWO} {{ y = Gemm(x, z) }}"),
    "einsum": ("float", f'{TWO} {{ y = Einsum <equation = "ij,jk->ik">(x, z) }}'),
    "double": ("double", f"{TWO} {{ y = MatMul(x, z) }}"),
    "gru": (
        "float",
        "(T[4,batch,8] x, T[1,12,8] z, T[1,12,4] r) => (T[4,1,batch,4] y)"
        " { y = GRU <hidden_size = 4>(x, z, r) }",
    ),
    "in-a-branch": (
        "float",
        "(T[batch,8] x, T[8,8] z, bool c) => (T[batch,8] y) { y = If(c) <then_branch = t () => (T[batch,8] a)"
        " { a = MatMul(x, z) }, else_branch = e () => (T[batch,8] b) { b = Neg(x) }> }",
    ),
    "bfloat16": ("bfloat16", f"{TWO} {{ a = Add(x, x) y = Identity(a) }}"),
}
TAKEN = {
    "half": ("float16", f"{TWO} {{ y = MatMul(x, z) }}"),
    "attention": ("float", f"{QKV} {{ y = Attention(x, k, v) }}"),
    "conv": ("float", "(T[batch,4,8,8] x, T[4,4,3,3] z) => (T[batch,4,6,6] y) { y = Conv(x, z) }"),
    "sum": ("float", '(T[batch,8] x) => (T[batch] y) { y = Einsum <equation = "ij->i">(x) }'),
    "softmax": ("float", "(T[batch,8] x) => (T[batch,8] y) { y = Softmax(x) }"),
}


def write(name: str, kind: str, body: str, folder: Path) -> Path:
    return write_case(Case(name, "", body.replace("T[", f"{kind}["), 23), folder)


def can_build(path: Path, sm: str) -> bool:
    """Whether TensorRT-RTX builds a plan, whatever the graph's inputs are."""
    import onnx

    graph = onnx.load(path).graph
    names = {1: "float32", 9: "bool", 10: "float16"}

    def describe(value: Any) -> TensorSpec:
        dims = value.type.tensor_type.shape.dim
        axes = tuple(Axis("batch", 1, 2, 4) if d.dim_param else int(d.dim_value) for d in dims)
        return TensorSpec(value.name, value.name, names[value.type.tensor_type.elem_type], axes)

    inputs, outputs = (tuple(map(describe, side)) for side in (graph.input, graph.output))
    artifact = Artifact("g", "portable", "fp16", 23, path.name, (), "right", inputs, outputs)
    profiles = [Profile("all", {"batch": (1, 2, 4)})]
    try:
        builds.build_plan(
            builds.PlanRequest(path, artifact, profiles, path.with_suffix(".plan"), "tensorrt-rtx", (sm,))
        )
    except BuildError as error:
        assert "name the other GPUs by --sm" in str(error), error  # no reason but the one that is foreseen
        return False
    return True


@needs_rtx
@pytest.mark.parametrize("name", [*REFUSED, *TAKEN])
def test_the_builder_refuses_what_is_foreseen_and_nothing_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "build_in_child", builder.build_in_this_process)  # which starts sooner
    kind, body = {**REFUSED, **TAKEN}[name]
    path = write(name, kind, body, tmp_path)
    foreseen = describe_unmet(path, SMS)
    assert list(foreseen) == (["sm75"] if name in REFUSED else [])
    findings = [f for f in lint(path, ["rtx", "tensorrt10.3"]).findings if f.rule == "older-hardware"]
    assert {f.target for f in findings} == ({"rtx"} if name in REFUSED else set())
    if kind in ("float", "float16"):  # bundles have no other types
        assert can_build(path, "sm75") is (name not in REFUSED)
        assert can_build(path, "sm80")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 one of whose weights is too large for fp16, so that its product stays in fp32."""
    folder = tmp_path_factory.mktemp("large") / "checkpoint"
    model: Any = tiny_gpt2(folder, n_layer=1, vocab_size=50257, bos_token_id=50256, eos_token_id=50256)
    weight = model.transformer.h[0].mlp.c_proj.weight.detach().clone()
    weight[0, 0] = 1e5
    edit_weights(folder, **{"transformer.h.0.mlp.c_proj.weight": weight})
    return write_gpt2(folder)


OPTIONS: dict[str, Any] = {"target": ["rtx"], "precision": ["fp32", "fp16"], "verify": False}


@needs_rtx
def test_a_gpu_without_a_kernel_gets_no_plan_and_it_is_said(checkpoint: Path, tmp_path: Path) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("planforge").addHandler(handler)
    try:
        export(checkpoint, tmp_path / "B", progress=said.append, **OPTIONS)
    finally:
        logging.getLogger("planforge").removeHandler(handler)
    (plan,) = Bundle.open(tmp_path / "B").manifest.plans
    assert plan.sms == tuple(sm for sm in SMS if sm != "sm75")
    (why,) = (line for line in said if "no plan for sm75" in line)
    assert "a product in fp32" in why and "--target cuda" in why
    assert said.index(why) < next(i for i, line in enumerate(said) if line.startswith("building a "))
    found = lint(tmp_path / "B", ["rtx"]).findings
    assert any(f.rule == "older-hardware" and "fp16" in f.graph for f in found)
    with pytest.raises(BuildOptionError, match=r"--sm 75: .*Leave out sm75: --sm sm80,sm86,sm89,sm120,sm12"):
        build(tmp_path / "B", sms=["75"])
    assert build(tmp_path / "B", sms=["sm86"]).plans[0].sms == ("sm86",)


@needs_rtx
def test_a_named_gpu_without_a_kernel_is_refused_before_verification(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("verification began")

    monkeypatch.setattr(exporting, "verify_model", fail)
    options = {**OPTIONS, "verify": "quick"}
    with pytest.raises(BuildOptionError, match=r"Leave out sm75: --sm sm86$"):
        export(checkpoint, tmp_path / "B", sms=["sm75", "sm86"], **options)
    assert not (tmp_path / "B").exists()


def test_a_healthy_model_is_built_for_every_gpu(demo_bundle: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(demo_bundle)
    half = [a for a in bundle.manifest.artifacts if a.precision == "fp16" and a.dialect != "ort"]
    assert half and not any(describe_unmet(bundle.path(a.file), SMS) for a in half)
    assert bundle.manifest.plans[0].sms == SMS
