"""What lint predicts, and what TensorRT-RTX's parser and builder really do: small graphs, then bundles."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.numpy_helper
import pytest

from planforge.exporter.errors import BuildError
from planforge.exporter.linting.all_rules import RULES
from planforge.exporter.linting.lint import lint
from planforge.exporter.linting.report import Finding, LintReport
from planforge.exporter.targets import TARGETS
from planforge.exporter.tensorrt import build, builder
from planforge.exporter.tensorrt.build import PlanRequest, build_plan
from planforge.exporter.tensorrt.profiles import derive_profiles
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.lint import Case, ask, model_of, verdicts_of, write_case
from ...helpers.lint_cases import BAD, BODY, CACHE, HALF_QKV, MS, OUT, QKV, SLOTS, THEN, WEIGHTS, X, Y

Network = dict[str, Any]
needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="needs pip install 'planforge[tensorrt-rtx]'",
)

GOOD = [
    *(Case(f"opset-{n}", "", f"({X}) => ({Y}) {{ y = Relu(x) }}", n) for n in (7, 13, 20, 24, 27)),
    Case("gelu", "", f"({X}) => ({Y}) {{ y = Gelu(x) }}"),
    Case("rms-norm", "", f"({X}, float[4] s) => ({Y}) {{ y = RMSNormalization(x, s) }}", 23),
    Case("swish", "", f"({X}) => ({Y}) {{ y = Swish(x) }}", 24),
    Case("norm", "", f"({X}, float[4] s, float[4] b) => ({Y}) {{ y = LayerNormalization(x, s, b) }}"),
    Case(
        "multi-head-attention",
        "",
        "(float[1,3,16] q, float[1,3,16] k, float[1,3,16] v) => (float[1,3,16] y)"
        " { y = com.microsoft.MultiHeadAttention <num_heads = 2>(q, k, v) }",
        domains=MS,
    ),
    Case("attention", "", f"({QKV}) => ({OUT}) {{ y = Attention(q, k, v) }}", 24),
    Case("no-softcap", "", f"({QKV}) => ({OUT}) {{ y = Attention <softcap = 0.0>(q, k, v) }}", 24),
    Case("causal", "", f"({QKV}) => ({OUT}) {{ y = Attention <is_causal = 1>(q, k, v) }}", 24),
    Case(
        "half-mask-of-half",
        "",
        f"({HALF_QKV}, float16[3,5] m) => (float16[1,2,3,8] y) {{ y = Attention(q, k, v, m) }}",
        24,
    ),
    Case("bool-mask", "", f"({QKV}, bool[3,5] m) => ({OUT}) {{ y = Attention(q, k, v, m) }}", 24),
    Case("cache", "", f"({CACHE}) => ({SLOTS}) {{ y = TensorScatter <axis = -2>(c, u, w) }}", 24),
    Case("cache-axis-2", "", f"({CACHE}) => ({SLOTS}) {{ y = TensorScatter <axis = 2>(c, u, w) }}", 24),
    Case(
        "cache-that-is-read-too",
        "",
        f"({CACHE}) => ({SLOTS}, float[batch,4,16,8] z)"
        " { y = TensorScatter <axis = -2>(c, u, w) z = Relu(y) }",
        24,
    ),
    Case(
        "scatter-nd", "", "(float[4] x, int64[2,1] i, float[2] u) => (float[4] y) { y = ScatterND(x, i, u) }"
    ),
    Case("axes-known", "", f"({X}) => (float[2,1] y) <int64[1] a = {{1}}> {{ y = ReduceSum(x, a) }}"),
    Case(
        "axes-computed-of-a-shape",
        "",
        f"({X}, float[1] o) => (float[2,1,4] y) <int64[1] z = {{0}}>"
        " { s = Size(o) a = Unsqueeze(s, z) y = Unsqueeze(x, a) v = Neg(o) }",
    ),
    Case(
        "top-3",
        "",
        "(float[2,8] x) => (float[2,3] y, int64[2,3] i) <int64[1] k = {3}> { y, i = TopK(x, k) }",
    ),
    Case("fmod-of-floats", "", f"({X}, float[2,4] z) => ({Y}) {{ y = Mod <fmod = 1>(x, z) }}"),
    Case(
        "branches",
        "",
        f"(bool c, {X}) => ({Y}) {{ y = If(c) <{THEN},"
        " else_branch = e () => (float[2,4] b) { b = Neg(x) }> }",
    ),
    Case(
        "loop",
        "",
        f"({X}) => ({Y}) <int64 n = {{3}}, bool k = {{1}}> {{ y = Loop(n, k, x)"
        f"<{BODY.format(2, 2)} {{ co = Identity(ci) o = Relu(a) }}> }}",
    ),
    Case("bfloat16", "", "(bfloat16[2,4] x) => (bfloat16[2,4] y) { y = Relu(x) }"),
    Case("uint8-input", "", f"(uint8[2,4] x) => ({Y}) {{ y = Cast <to = 1>(x) }}"),
    Case("int64-input", "", f"(int64[2,4] x) => ({Y}) {{ y = Cast <to = 1>(x) }}"),
    Case("double", "", "(double[2,4] x) => (double[2,4] y) { y = Sqrt(x) }"),
    Case(
        "quantized",
        "",
        f"({X}) => ({Y}) <float s = {{0.1}}, int8 z = {{0}}>"
        " { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }",
    ),
    Case(
        "int8-weights",
        "",
        f"({X}) => (float[2,2] y) <{WEIGHTS}> {{ d = DequantizeLinear(w, s) y = MatMul(x, d) }}",
    ),
    Case(
        "axes-of-three-names",
        "",
        "(float[1,p,4] x, float[1,t,4] n, float[1,s,4] m) => (float[1,s,4] y)"
        " { c = Concat <axis = 1>(x, n) y = Add(c, m) }",
        ranges={"p": (1, 3, 7), "t": (1, 1, 1), "s": (2, 4, 8)},
    ),
    Case(
        "empty-past",
        "",
        "(float[1,p,4] past, float[1,1,4] x) => (float[1,s,4] y) { y = Concat <axis = 1>(past, x) }",
        ranges={"p": (0, 4, 8)},
    ),
]

# What the parser takes and computes otherwise: each with what shows it in the parsed network, which is given
# with those of all cases.
WRONG: list[tuple[Case, Callable[[Network, dict[str, Network]], bool]]] = [
    (
        Case(
            "lengths-dropped",
            "input-dropped",
            f'({QKV}, int64[1] n) => ({OUT}) {{ y = Attention(q, k, v, "", "", "", n) }}',
            24,
        ),
        lambda network, _: network["unused"] == ["n"],
    ),
    (
        Case(
            "window-dropped",
            "input-dropped",
            f"({QKV}) => ({OUT}) {{ y = Attention <left_window_size = 1, right_window_size = 0>(q, k, v) }}",
            25,
        ),
        lambda network, all_of: network["layers"] == all_of["attention"]["layers"],
    ),
    (
        Case(
            "foreign-relu",
            "operator-foreign",
            f"({X}) => ({Y}) {{ y = my.own.Relu(x) }}",
            domains=("my.own",),
        ),
        lambda network, _: network["layers"] == [["ACTIVATION", "FLOAT"]],
    ),
    (
        Case(
            "uint8-as-int8",
            "quantization-form",
            f"({X}) => ({Y}) <float s = {{0.1}}, uint8 z = {{0}}>"
            " { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }",
        ),
        lambda network, _: ["QUANTIZE", "INT8"] in network["layers"],
    ),
    (
        Case(
            "uint8-by-default",
            "quantization-form",
            f"({X}) => ({Y}) <float s = {{0.1}}> {{ q = QuantizeLinear(x, s) y = DequantizeLinear(q, s) }}",
        ),
        lambda network, _: ["QUANTIZE", "INT8"] in network["layers"],
    ),
]

# Rules that a file beside the graph, or a number in fp16, breaks: they have tests of their own.
ELSEWHERE = {"weights-missing", "weights-outside", "mask-outside-fp16"}


def name_of(value: object) -> str:
    return value.name if isinstance(value, Case) else ""


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Network]:
    cases = [*BAD, *GOOD, *(case for case, _ in WRONG)]
    return verdicts_of(cases, tmp_path_factory.mktemp("rtx"))


def errors_of(case: Case, folder: Path) -> dict[str, set[str]]:
    """The rules of what lint calls errors and wrong results, by severity."""
    findings = lint(write_case(case, folder), ["rtx"]).findings
    found: dict[str, set[str]] = {"error": set(), "wrong": set()}
    for finding in findings:
        if finding.is_error:
            found[finding.severity].add(finding.rule)
    return found


def test_every_rule_of_an_error_has_a_graph_that_breaks_it() -> None:
    rtx = TARGETS["rtx"]
    rules = {rule.id for rule in RULES if rule.holds(rtx) and rule.severity != "warning"}
    assert rules == {case.rule for case in (*BAD, *(case for case, _ in WRONG))} | ELSEWHERE
    assert len({case.name for case in BAD}) == len(BAD)


@needs_rtx
@pytest.mark.parametrize("case", BAD, ids=name_of)
def test_what_lint_calls_an_error_is_refused(
    case: Case, networks: dict[str, Network], tmp_path: Path
) -> None:
    network = networks[case.name]
    assert not (network["parsed"] and network["built"]), network
    assert case.rule in errors_of(case, tmp_path)["error"]


@needs_rtx
@pytest.mark.parametrize("case", GOOD, ids=name_of)
def test_what_lint_lets_pass_is_built(case: Case, networks: dict[str, Network], tmp_path: Path) -> None:
    network = networks[case.name]
    assert network["parsed"] and network["built"], network
    assert errors_of(case, tmp_path) == {"error": set(), "wrong": set()}


@needs_rtx
@pytest.mark.parametrize(("case", "shows"), WRONG, ids=name_of)
def test_what_lint_calls_wrong_is_parsed_otherwise(
    case: Case,
    shows: Callable[[Network, dict[str, Network]], bool],
    networks: dict[str, Network],
    tmp_path: Path,
) -> None:
    network = networks[case.name]
    assert network["parsed"] and network["built"] and shows(network, networks), network
    assert errors_of(case, tmp_path) == {"error": set(), "wrong": {case.rule}}


@needs_rtx
def test_a_tied_table_lies_twice_in_the_plan_if_its_rows_are_odd(tmp_path: Path) -> None:
    graphs: list[tuple[str, str, dict[str, Any]]] = []
    tables = {}
    rules = {}
    for rows in (4096, 4097):
        body = "(int64[2] i) => (float[2,n] y) { g = Gather(w, i) t = Transpose(w) y = MatMul(g, t) }"
        model = model_of(Case(str(rows), "", body))
        tables[rows] = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(tables[rows], "w"))
        path = tmp_path / f"{rows}.onnx"
        path.write_bytes(model.SerializeToString())
        graphs.append((str(rows), str(path), {}))
        rules[rows] = [finding.rule for finding in lint(path, ["rtx"]).findings]
    assert rules == {4096: ["older-hardware"], 4097: ["weights-tied", "older-hardware"]}
    plans = ask(graphs, tmp_path)
    assert plans["4096"]["bytes"] < 1.5 * tables[4096].nbytes
    assert plans["4097"]["bytes"] > 1.9 * tables[4097].nbytes


# Our own graphs

CLAIMS = {  # a dialect, and where it is claimed to run
    "portable": ("tensorrt10.3", "jetpack6.2", "cpu", "rtx"),
    "inplace": ("rtx", "tensorrt10.15", "jetpack7.2", "tensorrt11.2", "cpu"),
    "ort": ("cpu",),
}


@pytest.fixture(scope="module", params=["decoder", "encoder", "translator"])
def bundle(request: pytest.FixtureRequest) -> Path:
    if request.param == "encoder":
        return Path(request.getfixturevalue("head_bundle")("classifier"))
    return Path(request.getfixturevalue({"decoder": "demo_bundle"}.get(request.param, "marian_bundle")))


def test_no_error_is_found_where_we_claim_to_run(bundle: Path) -> None:
    for artifact in Bundle.open(bundle).manifest.artifacts:
        assert find_errors(lint(bundle / artifact.file, CLAIMS[artifact.dialect])) == []


@needs_rtx
def test_lint_agrees_with_tensorrt_rtx_on_our_graphs(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "build_in_child", builder.build_in_this_process)  # which starts sooner
    artifacts = Bundle.open(bundle).manifest.artifacts
    for artifact in artifacts:
        try:
            profiles = derive_profiles(artifact, max_length=32)
            out = tmp_path / f"{artifact.id}.plan"
            build_plan(PlanRequest(bundle / artifact.file, artifact, profiles, out, sms=["sm86"]))
            refused = ""
        except BuildError as error:
            refused = str(error)
        errors = find_errors(lint(bundle / artifact.file, ["rtx"]))
        assert (not errors) == (not refused), (artifact.id, refused, errors)


def find_errors(report: LintReport) -> list[Finding]:
    """Return the errors of a file, but for the length of its cache, which `build` makes a number."""
    return [finding for finding in report.findings if finding.is_error and finding.rule != "cache-length"]
