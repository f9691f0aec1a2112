"""What lint predicts for a CPU, and what ONNX Runtime really does; masks, and what fp16 makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from planforge.exporter.linting.all_rules import RULES
from planforge.exporter.linting.lint import lint
from planforge.exporter.targets import TARGETS

from ...helpers.lint import Case, model_of, write_case
from ...helpers.lint_cases import HALF_QKV, MS, OUT, QKV, X, Y

BAD = [
    Case("opset-27", "opset", f"({X}) => ({Y}) {{ y = Relu(x) }}", 27),
    Case("ir-14", "opset", f"({X}) => ({Y}) {{ y = Relu(x) }}", ir=14),
    Case("no-operator", "kernel-missing", f"({X}) => ({Y}) {{ y = Nonsense(x) }}"),
    Case("no-domain", "kernel-missing", f"({X}) => ({Y}) {{ y = my.own.Relu(x) }}", domains=("my.own",)),
    Case(
        "matmul-in-bfloat16",
        "kernel-missing",
        "(bfloat16[2,4] x, bfloat16[4,2] z) => (bfloat16[2,2] y) { y = MatMul(x, z) }",
    ),
    Case("argmax-of-int16", "kernel-missing", "(int16[2,4] x) => (int64[1,4] y) { y = ArgMax(x) }"),
    Case(
        "window",
        "attribute-unknown",
        f"({QKV}) => ({OUT}) {{ y = Attention <left_window_size = 1, right_window_size = 0>(q, k, v) }}",
        25,
    ),
    Case("two-types", "mixed-types", "(float16[2,4] x, float[4] s) => (float16[2,4] y) { y = Add(x, s) }"),
    Case("root-of-integers", "type-invalid", "(int64[2,4] x) => (int64[2,4] y) { y = Sqrt(x) }"),
    Case("one-name", "node-names", f"({X}) => ({Y}) {{ [a] z = Relu(x) [a] y = Relu(z) }}"),
    Case("cycle", "cycle", f"({X}) => ({Y}) {{ y = Add(x, z) z = Relu(y) }}"),
    Case("ghost", "tensor-undefined", f"({X}) => ({Y}) {{ y = Add(x, ghost) }}"),
    Case("left-out", "input-left-out", f'({X}) => ({Y}) {{ y = Relu("") }}'),
]
GOOD = [
    Case("opset-26", "", f"({X}) => ({Y}) {{ y = Relu(x) }}", 26),
    Case("ir-13", "", f"({X}) => ({Y}) {{ y = Relu(x) }}", ir=13),
    Case("contrib", "", f"({X}) => ({Y}) {{ y = com.microsoft.Gelu(x) }}", domains=MS),
    Case("half", "", "(float16[2,4] x, float16[4,2] z) => (float16[2,2] y) { y = MatMul(x, z) }"),
    Case("by-function", "", f"({X}) => ({Y}) {{ y = Bernoulli(x) }}"),
    Case(
        "integers",
        "",
        "(int64[2,4] x, int64[4,2] z) => (int64[2,2] y) { y = MatMul(x, z) }",
    ),
    Case(
        "dynamic-quantize",
        "",
        f"({X}) => (uint8[2,4] y, float s, uint8 z) {{ y, s, z = DynamicQuantizeLinear(x) }}",
    ),
    Case("attention", "", f"({QKV}) => ({OUT}) {{ y = Attention(q, k, v) }}", 24),
    Case("half-attention", "", f"({HALF_QKV}) => (float16[1,2,3,8] y) {{ y = Attention(q, k, v) }}", 24),
    Case(
        "lengths",
        "",
        f'({QKV}, int64[1] n) => ({OUT}) {{ y = Attention(q, k, v, "", "", "", n) }}',
        24,
    ),
    Case(
        "sequence",
        "",
        f"({X}) => ({Y}) <int64 i = {{0}}> {{ s = SequenceConstruct(x, x) y = SequenceAt(s, i) }}",
    ),
]


def refused(path: Path) -> str:
    """Why ONNX Runtime makes no session of a graph."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no base of their own
        return str(error)
    return ""


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_what_lint_calls_an_error_has_no_session(case: Case, tmp_path: Path) -> None:
    path = write_case(case, tmp_path)
    assert case.rule in {finding.rule for finding in lint(path, ["cpu"]).findings if finding.is_error}
    assert refused(path)


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_what_lint_lets_pass_has_a_session(case: Case, tmp_path: Path) -> None:
    path = write_case(case, tmp_path)
    assert lint(path, ["cpu"]).passed
    assert refused(path) == ""


def test_every_rule_of_an_error_has_a_graph_that_breaks_it() -> None:
    rules = {rule.id for rule in RULES if rule.holds(TARGETS["cpu"]) and rule.severity != "warning"}
    elsewhere = {"dimension-name", "weights-missing", "weights-outside"}
    assert rules | {"opset"} == {case.rule for case in BAD} | elsewhere


def test_lengths_of_one_name_are_only_a_warning_as_onnx_runtime_looks_at_numbers(tmp_path: Path) -> None:
    body = (
        "(float[1,p,4] x, float[1,t,4] n, float[1,p,4] m) => (float[1,s,4] y)"
        " { c = Concat <axis = 1>(x, n) y = Add(c, m) }"
    )
    path = write_case(Case("g", "", body), tmp_path)
    (finding,) = lint(path, ["cpu"]).findings
    assert (finding.rule, finding.severity) == ("dimension-name", "warning")
    session = ort.InferenceSession(path)
    feeds = {name: np.ones((1, n, 4), np.float32) for name, n in {"x": 2, "n": 3, "m": 5}.items()}
    assert session.run(None, feeds)[0].shape == (1, 5, 4)
    with pytest.raises(Exception, match="axis"):
        session.run(None, {**feeds, "m": np.ones((1, 2, 4), np.float32)})


# Masks

SCORES = -648.0  # of a row in which nothing is seen
ADDED = "y = Softmax(a) a = Add(x, m) m = Where(c, o, n)"
SUBTRACTED = "y = Softmax(a) a = Sub(x, m) m = Where(c, o, n)"
SELECTED = "y = Softmax(a) a = Where(c, x, n)"
MASKS = [  # how, the mask's number, whether the graph is fp16, and whether lint calls it wrong
    (ADDED, -65504.0, True, True),
    (ADDED, -30000.0, True, False),
    (ADDED, -60000.0, True, False),
    (SUBTRACTED, 65504.0, True, True),
    (SUBTRACTED, 30000.0, True, False),
    (SELECTED, -65504.0, True, False),
    (ADDED, -65504.0, False, False),
    (ADDED, float(np.finfo(np.float32).min), False, False),
]


def mask_graph(how: str, number: float, half: bool) -> onnx.ModelProto:
    kind = "float16" if half else "float"
    lines = " ".join(reversed(how.replace(") ", ")\n").split("\n")))
    model: onnx.ModelProto = model_of(
        Case("mask", "", f"({kind}[1,4] x, bool[1,4] c) => ({kind}[1,4] y) {{ {lines} }}")
    )
    dtype = np.float16 if half else np.float32
    for name, value in (("n", number), ("o", 0.0)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, dtype), name))
    return model


@pytest.mark.parametrize(("how", "number", "half", "wrong"), MASKS)
def test_a_mask_is_called_wrong_where_a_row_that_sees_nothing_becomes_nan(
    how: str, number: float, half: bool, wrong: bool, tmp_path: Path
) -> None:
    path = tmp_path / "mask.onnx"
    model = mask_graph(how, number, half)
    path.write_bytes(model.SerializeToString())
    found = [finding for finding in lint(path, ["rtx"]).findings if finding.rule == "mask-outside-fp16"]
    assert [finding.severity for finding in found] == ["wrong"] * wrong
    scores = np.full((1, 4), SCORES, np.float16 if half else np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        (weights,) = ReferenceEvaluator(model).run(None, {"x": scores, "c": np.zeros((1, 4), bool)})
    assert bool(np.isnan(weights).any()) == wrong


@pytest.mark.parametrize(
    ("mask", "used", "last"),
    [
        ("Sub(one, c)", "Sub(x, h)", "Softmax"),  # GPT-2's own: w * b - 1e9 * (1 - b)
        ("Sub(c, one)", "Add(x, h)", "Softmax"),
        ("Sub(c, one)", "Add(x, h)", "LogSoftmax"),
    ],
)
def test_a_mask_that_is_multiplied_is_wrong_whatever_its_sign(
    mask: str, used: str, last: str, tmp_path: Path
) -> None:
    body = "(float16[1,4] x, float[1,4] c) => (float16[1,4] y)" + (
        f"{{ m = {mask} b = Mul(m, n) h = Cast <to = 10>(b) a = {used} y = {last}(a) }}"
    )
    model = model_of(Case("mask", "", body))
    for name, value in (("n", 1e9), ("one", 1.0)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, np.float32), name))
    path = tmp_path / "mask.onnx"
    path.write_bytes(model.SerializeToString())
    findings = {(finding.rule, finding.severity) for finding in lint(path, ["rtx"]).findings}
    assert ("mask-outside-fp16", "wrong") in findings
    feeds = {"x": np.full((1, 4), SCORES, np.float16), "c": np.zeros((1, 4), np.float32)}
    with np.errstate(over="ignore", invalid="ignore"):
        (weights,) = ReferenceEvaluator(model).run(None, feeds)
    assert np.isnan(weights).all()


def test_a_float_mask_that_is_cast_to_half_is_wrong(tmp_path: Path) -> None:
    body = "(float16[1,4] x, bool[1,4] c) => (float16[1,4] y)" + (
        "{ m = Where(c, o, n) h = Cast <to = 10>(m) a = Add(x, h) y = Softmax(a) }"
    )
    model = model_of(Case("mask", "", body))
    for name, value in (("n", np.finfo(np.float32).min), ("o", 0.0)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, np.float32), name))
    path = tmp_path / "mask.onnx"
    path.write_bytes(model.SerializeToString())
    (finding,) = lint(path, ["rtx"]).findings
    assert (finding.rule, finding.severity) == ("mask-outside-fp16", "wrong")
    assert "-3.40282e+38" in finding.what
    scores = np.full((1, 4), SCORES, np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        (weights,) = ReferenceEvaluator(model).run(None, {"x": scores, "c": np.zeros((1, 4), bool)})
    assert np.isnan(weights).all()


def test_a_float_mask_is_a_warning_where_a_flag_can_make_it_half(tmp_path: Path) -> None:
    path = tmp_path / "mask.onnx"
    path.write_bytes(mask_graph(ADDED, -1e38, half=False).SerializeToString())
    report = lint(path, ["tensorrt8.6", "tensorrt10.3", "tensorrt11.2", "rtx"])
    rules = {finding.target: finding.severity for finding in report.findings if finding.rule[:4] == "mask"}
    assert rules == {"tensorrt8.6": "warning", "tensorrt10.3": "warning"}


@pytest.mark.parametrize("guard", [False, True])
def test_minus_infinity_is_a_warning_unless_nan_is_looked_for(guard: bool, tmp_path: Path) -> None:
    lines = "a = Where(c, x, n) s = Softmax(a) "
    lines += "b = IsNaN(s) y = Where(b, o, s)" if guard else "y = Identity(s)"
    model = model_of(Case("mask", "", f"(float[1,4] x, bool[1,4] c) => (float[1,4] y) {{ {lines} }}"))
    for name, value in (("n", -np.inf), ("o", 0.0)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, np.float32), name))
    path = tmp_path / "mask.onnx"
    path.write_bytes(model.SerializeToString())
    assert [finding.severity for finding in lint(path, ["rtx"]).findings] == ["warning"] * (not guard)
    feeds = {"x": np.zeros((1, 4), np.float32), "c": np.zeros((1, 4), bool)}
    with np.errstate(invalid="ignore"):
        (weights,) = ReferenceEvaluator(model).run(None, feeds)
    assert bool(np.isnan(weights).any()) == (not guard)
