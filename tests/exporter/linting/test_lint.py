"""`planforge lint`: targets, findings, weights that are not read, and input that is no graph."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from typer.testing import CliRunner

from planforge.exporter.linting import operator_tables as tables
from planforge.exporter.linting.all_rules import RULES, list_targets_and_rules
from planforge.exporter.linting.lint import lint
from planforge.exporter.linting.report import LintReport
from planforge.exporter.targets import NAMES, TARGETS, find_targets
from planforge.runtime.errors import BundleError, InputError

from ...helpers.lint import Case, model_of, write_case
from ...helpers.lint_cases import X, Y

RELU = f"({X}) => ({Y}) {{ y = Relu(x) }}"


def found(report: LintReport, rule: str) -> dict[str, str]:
    """The severity by target of a rule's findings."""
    return {finding.target: finding.severity for finding in report.findings if finding.rule == rule}


def errors(report: LintReport) -> set[str]:
    return {finding.target for finding in report.findings if finding.is_error}


# Targets


def test_names_of_targets_say_their_engine_and_version() -> None:
    assert list(TARGETS) == [target.name for target in TARGETS.values()]
    for name, target in TARGETS.items():
        assert target.opsets[0] < target.opsets[1] and target.source
        if name.startswith("tensorrt"):
            assert name == "tensorrt{}.{}".format(*target.version)
    assert TARGETS["jetpack6.2"].version == (10, 3) and TARGETS["jetpack6.0"].version == (8, 6)


@pytest.mark.parametrize(
    ("operator", "first"),
    [
        ("LayerNormalization", (8, 6)),
        ("Gelu", (10, 0)),
        ("Attention", (10, 14)),
        ("RMSNormalization", (10, 15)),
        ("TensorScatter", (10, 15)),
        ("Swish", (11, 0)),
    ],
)
def test_an_operator_is_an_error_before_the_version_that_brought_it(
    operator: str, first: tuple[int, int], tmp_path: Path
) -> None:
    bodies = {
        "LayerNormalization": f"({X}, float[4] s) => ({Y}) {{ y = LayerNormalization(x, s) }}",
        "RMSNormalization": f"({X}, float[4] s) => ({Y}) {{ y = RMSNormalization(x, s) }}",
        "Attention": "(float[1,2,3,8] x) => (float[1,2,3,8] y) { y = Attention(x, x, x) }",
        "TensorScatter": "(float[1,4,16,8] c, float[1,4,1,8] u) => (float[1,4,16,8] y)"
        " { y = TensorScatter(c, u) }",
    }
    body = bodies.get(operator, f"({X}) => ({Y}) {{ y = {operator}(x) }}")
    opset = 17 if operator == "LayerNormalization" else 20 if operator == "Gelu" else 24
    report = lint(write_case(Case("g", "", body, opset), tmp_path))
    older = {n for n, t in TARGETS.items() if t.engine == "tensorrt" and t.version < first}
    assert set(found(report, "operator-unsupported")) == older
    assert all(
        f"{first[0]}.{first[1]}" in f.what for f in report.findings if f.rule == "operator-unsupported"
    )


def test_every_operator_of_the_tables_is_onnx_own() -> None:
    names = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    assert names >= tables.IN_8_5 | tables.SINCE.keys() | tables.RTX_LACKS | set(tables.OUTPUTS)
    assert not tables.IN_8_5 & tables.SINCE.keys()
    assert names >= {operator for operator, _ in tables.CONSTANT_INPUTS}


@pytest.mark.parametrize("opset", [7, 17, 20, 22, 24, 26])
def test_an_opset_outside_the_documented_ones_is_told(opset: int, tmp_path: Path) -> None:
    report = lint(write_case(Case("g", "", RELU, opset), tmp_path))
    outside = {n for n, t in TARGETS.items() if not t.opsets[0] <= opset <= t.opsets[1]}
    assert set(found(report, "opset")) == outside - {"cpu"}
    assert report.passed


def test_reductions_of_opset_18_lose_their_axes_before_tensorrt_9(tmp_path: Path) -> None:
    body = f"({X}) => (float[2,1] y) <int64[1] a = {{1}}> {{ y = ReduceMax(x, a) }}"
    report = lint(write_case(Case("g", "", body, 18), tmp_path))
    old = {n for n, t in TARGETS.items() if t.engine == "tensorrt" and t.version < (9, 0)}
    assert {n for n, kind in found(report, "operator-newer").items() if kind == "wrong"} == old


def test_int64_inputs_and_functions_are_told_of_before_tensorrt_9(tmp_path: Path) -> None:
    model = model_of(
        Case("g", "", f"(int64[2,4] i) => ({Y}) {{ x = Cast <to = 1>(i) y = own.f(x) }}", 17, ("own",))
    )
    node = helper.make_node("Relu", ["a"], ["b"])
    opset = helper.make_opsetid("", 17)
    model.functions.append(helper.make_function("own", "f", ["a"], ["b"], [node], [opset]))
    path = tmp_path / "g.onnx"
    path.write_bytes(model.SerializeToString())
    old = {n for n, t in TARGETS.items() if t.engine == "tensorrt" and t.version < (9, 0)}
    report = lint(path)
    assert set(found(report, "int64-input")) == set(found(report, "function")) == old
    assert errors(report) == old


PLANS = {name for name, target in TARGETS.items() if target.plans}
TENSORRT = PLANS - {"rtx"}
HALF = "(float16[2,4] x, float16[4,2] z) => (float16[2,2] y) { y = MatMul(x, z) }"
FP8 = f"(float8e4m3fn[2,4] x, float s) => ({Y}) {{ y = DequantizeLinear(x, s) }}"


@pytest.mark.parametrize(
    ("rule", "body", "targets"),
    [
        ("input-unused", f"({X}, float[3] z) => ({Y}) {{ y = Relu(x) }}", PLANS),
        ("data-dependent-shape", f"({X}) => (int64[2,n] y) {{ y = NonZero(x) }}", TENSORRT),
        ("double", "(double[2,4] x) => (double[2,4] y) { y = Sqrt(x) }", PLANS),
        ("fp8-hardware", FP8, PLANS),
        ("fp16-on-cpu", HALF, {"cpu"}),
        ("operator-unsupported", f"({X}) => ({Y}) {{ y = Clip_TRT(x) }}", TENSORRT),
    ],
)
def test_a_warning_is_told_where_it_holds(rule: str, body: str, targets: set[str], tmp_path: Path) -> None:
    report = lint(write_case(Case("g", "", body), tmp_path))
    assert {name for name, kind in found(report, rule).items() if kind == "warning"} == targets
    good = lint(write_case(Case("good", "", RELU), tmp_path))
    assert not found(good, rule)


# Findings


def layers(count: int) -> str:
    nodes = [f"[h{i}] x{i + 1} = Det(x{i})" for i in range(count)]
    return f"(float[2,4,4] x0) => (float[2] x{count}) {{ {' '.join(nodes)} }}"


@given(count=st.integers(1, 12))
@settings(max_examples=8, deadline=None)
def test_a_fault_of_every_layer_is_one_finding(count: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write_case(Case("g", "", layers(count)), tmp_path_factory.mktemp("layers"))
    (finding,) = (f for f in lint(path, ["rtx"]).findings if f.rule == "operator-unsupported")
    assert finding.nodes == tuple(f"h{i}" for i in range(count))
    start = f"{count} nodes: h0, h1" if count > 1 else "h0"
    assert finding.where.startswith(start) and finding.where.endswith(", ...") == (count > 3)


def test_a_report_is_plain_json_and_tables_with_the_way_out(tmp_path: Path) -> None:
    path = write_case(Case("g", "", layers(2)), tmp_path)
    report = lint(path, ["rtx", "cpu", "rtx"])
    value = json.loads(json.dumps(report.to_json()))
    assert value["verdicts"][0] == {"graph": "g.onnx", "target": "rtx", "error": 1, "wrong": 0, "warning": 0}
    assert value["findings"][0]["nodes"] == ["h0", "h1"] and value["passed"] is False
    assert all(finding["fix"] and finding["source"] for finding in value["findings"])
    assert report.targets == ("rtx", "cpu")
    assert len(report.tables()) == 2


def test_every_rule_has_a_source_a_way_out_and_a_target() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.source.startswith(("https://", "measured", "compared")) and rule.fix and rule.about
        assert any(rule.holds(target) for target in find_targets(NAMES))
    (_, _, targets), (_, _, rules) = list_targets_and_rules()
    assert [row[0] for row in targets] == list(TARGETS) and len(rules) == len(RULES)


# Weights


def with_external(folder: Path, dims: list[int], names: tuple[str, ...], file: str = "w.data") -> Path:
    """A graph that multiplies with weights of one file, one behind the other."""
    nodes = []
    size = 4 * int(np.prod(dims))
    inits = []
    for i, name in enumerate(names):
        tensor = TensorProto(
            name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL
        )
        for key, value in (("location", file), ("offset", i * size), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        inits.append(tensor)
        nodes.append(helper.make_node("MatMul", [f"x{i}", name], [f"x{i + 1}"], name=f"mm{i}"))
    values = [helper.make_tensor_value_info(f"x{i}", 1, ["b", dims[0]]) for i in (0, len(names))]
    graph = helper.make_graph(nodes, "g", [values[0]], [values[1]], inits)
    path = folder / "g.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


def test_500_mb_of_weights_are_not_read(tmp_path: Path) -> None:
    names = tuple(f"w{i}" for i in range(8))
    path = with_external(tmp_path, [4096, 4096], names)
    with (tmp_path / "w.data").open("wb") as file:
        file.truncate(8 * 4096 * 4096 * 4)  # holes: the disk has none of it
    code = (
        "import re, sys; from planforge.exporter.linting.lint import lint;"
        f"report = lint({str(path)!r}); assert report.passed, report.findings;"
        "heavy = {'torch', 'transformers', 'onnxscript', 'planforge.models'} & set(sys.modules);"
        # ru_maxrss would begin with what the process that forked it had
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]);"
        "sys.exit(', '.join(heavy) or None)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) * 1024 < 350e6  # of 537 MB of weights


def test_weights_that_are_missing_or_cut_short_are_findings(tmp_path: Path) -> None:
    path = with_external(tmp_path, [64, 64], ("a", "b"))
    report = lint(path)
    assert errors(report) == set(TARGETS) and set(found(report, "weights-missing")) == set(TARGETS)
    (finding,) = (f for f in report.findings if f.target == "cpu")
    assert finding.tensors == ("a", "b") and "'w.data' is missing" in finding.what
    (tmp_path / "w.data").write_bytes(bytes(64 * 64 * 4))
    (finding,) = lint(path, ["cpu"]).findings
    assert finding.tensors == ("b",) and "has 16384 bytes" in finding.what
    (tmp_path / "w.data").write_bytes(bytes(2 * 64 * 64 * 4))
    assert lint(path).passed


@given(
    rows=st.sampled_from([160, 256]),
    seed=st.integers(0, 5),
    kind=st.sampled_from(["same", "turned", "other"]),
)
@settings(max_examples=10, deadline=None)
def test_weights_with_the_same_numbers_are_told(
    rows: int, seed: int, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("twice")
    random = np.random.default_rng(seed)
    first = random.standard_normal((rows, 256)).astype(np.float32)
    other = random.standard_normal((rows, 256)).astype(np.float32)
    second = {"same": first.copy(), "turned": first.T.copy(), "other": other}[kind]
    body = "(float[1,4] x) => (float[1,4] y) { y = Relu(x) p = Identity(a) q = Identity(b) }"
    model = model_of(Case("g", "", body))
    for name, numbers in (("a", first), ("b", second)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, name))
    paths = [folder / "inside.onnx", folder / "beside.onnx"]
    onnx.save(model, paths[0])
    onnx.save(model, paths[1], save_as_external_data=True, location="w.data")
    for path in paths:
        hits = [f for f in lint(path, ["cpu"]).findings if f.rule == "weights-twice"]
        assert [hit.tensors for hit in hits] == ([] if kind == "other" else [("b",)])


# Input that is no graph


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"", "no graph"), (b"not a graph at all", "not an ONNX file"), (b"\x08\x0a", "no graph")],
)
def test_a_file_that_is_no_graph_is_one_line(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(content)
    with pytest.raises(InputError, match=told) as error:
        lint(path)
    assert "\n" not in str(error.value)


def test_no_file_no_bundle_and_no_target(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing\.onnx does not exist; give .* `planforge export` wrote"):
        lint(tmp_path / "missing.onnx")
    with pytest.raises(BundleError):
        lint(tmp_path)
    path = write_case(Case("g", "", RELU), tmp_path)
    with pytest.raises(InputError, match=r"'tensorrt7' is not one of cpu, rtx, .*jetpack6\.2"):
        lint(path, ["rtx", "tensorrt7"])


@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), cut=st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_damaged_file_never_crashes(
    place: float, byte: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    body = f"({X}) => ({Y}) <float[4] s = {{1, 1, 1, 1}}, float[2] a = {{1, 2}}> {{"
    body += " c = Constant <value = float[1] {2}>() z = LayerNormalization(x, s) y = Div(z, c) }"
    folder = tmp_path_factory.mktemp("damaged")
    content = bytearray(write_case(Case("g", "", body), folder).read_bytes())
    index = int(len(content) * place)
    content[index : index + 1] = bytes([byte])
    path = folder / "damaged.onnx"
    path.write_bytes(content[:index] if cut else content)
    try:
        lint(path)
    except InputError as error:
        assert "damaged.onnx" in str(error)


def test_operators_and_domains_that_nobody_knows_are_findings(tmp_path: Path) -> None:
    body = f"({X}) => ({Y}) {{ a = Nonsense(x) b = nobody.Thing(a) y = Relu(b) }}"
    report = lint(write_case(Case("g", "", body, domains=("nobody",)), tmp_path))
    assert errors(report) == set(TARGETS)


# The command


def command(*arguments: str | Path) -> tuple[int, str, str]:
    from planforge.exporter.commands.app import app

    result = CliRunner().invoke(app, ["lint", *map(str, arguments)], env={**os.environ, "COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def test_the_command_fails_for_errors_only(tmp_path: Path) -> None:
    good = write_case(Case("good", "", RELU), tmp_path)
    bad = write_case(Case("bad", "", layers(2)), tmp_path)
    code, out, _ = command(good, "--target", "rtx, jetpack6.2")
    assert code == 0 and "nothing found" in out and "jetpack6.2" in out
    code, out, _ = command(good)
    assert code == 0 and "1 warning" in out  # of opset 20 on TensorRT 8
    code, out, _ = command(bad, "--target", "rtx")
    assert code == 1 and "1 error" in out and "operator-unsupported" in out
    code, out, _ = command(bad, "--target", "rtx", "--json")
    assert code == 1 and json.loads(out)["passed"] is False


def test_the_command_says_what_it_needs_and_what_it_knows(tmp_path: Path) -> None:
    code, _, told = command()
    assert code == 2 and "--rules" in told
    code, out, _ = command("--rules")
    assert code == 0 and all(rule.id in out for rule in RULES) and "jetpack6.2" in out
