"""Rules about ONNX Runtime on a GPU: what a kernel reads on the host must be there.

An H200 read zeros where the graph computed the number of slots from an input, and ran GroupQueryAttention in
fp32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest

from planforge.exporter import export, lint
from planforge.exporter.commands.inspection import inspect
from planforge.exporter.commands.kernel_count import count_kernels
from planforge.exporter.linting.cuda_rules import Placement
from planforge.exporter.verification.structure import compare_structure
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.cli import planforge
from ...helpers.lint import Case, model_of, write_case
from ...helpers.lint_cases import MS
from ...helpers.old_graphs import compute_total_in_the_graph

ML = ("ai.onnx.ml",)
BRANCHES = (
    "then_branch = one () => (float[m] p) { p = Abs(x) }, else_branch = two () => (float[m] q) { q = Neg(x) }"
)
COMPUTED = "m = ReduceMax <keepdims = 0>(p) s = Shape <start = 1, end = 2>(q) c = Cast <to = 6>(s)"


def attend(total: str, before: str = "", dtype: str = "float16") -> str:
    """A graph with one GroupQueryAttention."""
    inputs = f"{dtype}[1,n,64] q, {dtype}[1,2,8,64] a, {dtype}[1,2,8,64] b, int32[1] l, int32[1] p, int32 t"
    outputs = f"{dtype}[1,n,64] y, {dtype}[1,2,8,64] d, {dtype}[1,2,8,64] e"
    call = "com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1>"
    return f"({inputs}) => ({outputs}) {{ {before} y, d, e = {call}(q, q, q, a, b, l, {total}) }}"


@pytest.mark.parametrize(
    ("body", "late"),
    [
        (attend("t"), []),
        (attend("u", "s = Shape <start = 1, end = 2>(q) v = Squeeze(s) u = Cast <to = 6>(v)"), []),
        (attend("u", f"{COMPUTED} v = Squeeze(c) u = Add(m, v)"), ["reads 'u' on the host before the GPU"]),
        (attend("u", "u = Identity(t)"), ["reads 'u' on the host before the GPU has computed it"]),
        ("(float[n] x, int64[k] i) => (float[m] y) { y = Expand(x, i) }", []),
        ("(float[n] x, int64[k] i) => (float[m] y) { j = Abs(i) y = Expand(x, j) }", ["reads 'j' on the"]),
        # ONNX Runtime launches Range on the GPU, as it reads the shape on the host anyway.
        (
            "(float[n] x) => (float[m] y)"
            " <int64 o = {0}, int64 i = {1}> { s = Size(x) r = Range(o, s, i) y = Expand(x, r) }",
            ["reads 'r' on the host"],
        ),
        ("(float[n] x, float m) => (float[n] y) { y = Clip(x, m) }", []),
        ("(float[n] x, float m) => (float[n] y) { a = Abs(m) y = Clip(x, a) }", ["reads 'a' on the host"]),
        (
            "(float[n] x, int64[k] i) => (float r) { a = Abs(i) r = ReduceSum <keepdims = 0>(x, a) }",
            ["reads 'a' on the host"],
        ),
        ("(float[n] x) => (float r) { a = ReduceMax <keepdims = 0>(x) r = Identity(a) }", []),
        (f"(float[n] x, bool b) => (float[m] y) {{ c = Not(b) y = If(c) <{BRANCHES}> }}", ["reads 'c' on"]),
        (f"(float[n] x, bool b) => (float[m] y) {{ y = If(b) <{BRANCHES}> }}", []),
        # What comes from around the branch is waited for, what a branch computes is not.
        (
            "(float[n] x, int64[k] i, bool b) => (float[m] y) { j = Abs(i) y = If(b) <"
            "then_branch = one () => (float[m] p) { p = Expand(x, j) },"
            "else_branch = two () => (float[m] q) { h = Abs(i) q = Expand(x, h) }> }",
            ["reads 'h' on the host"],
        ),
    ],
)  # fmt: skip
def test_what_is_read_on_the_host_is_an_input_or_follows_from_shapes(
    body: str, late: list[str], tmp_path: Path
) -> None:
    path = write_case(Case("g", "", body, 20, domains=MS), tmp_path)
    found = [finding for finding in lint(path, ["cuda"]).findings if finding.rule == "host-input"]
    assert len(found) == len(late)
    for finding, words in zip(found, late, strict=True):
        assert finding.severity == "wrong" and words in finding.what
    assert "host-input" not in {finding.rule for finding in lint(path, ["cpu", "rtx"]).findings}


def test_nodes_are_counted_where_they_run(tmp_path: Path) -> None:
    """By hand: the Constant is gone when it is loaded, Shape and Squeeze are shapes, Tan has no kernel."""
    body = (
        "(float[a,b] x) => (float[m] y, float[a,b] z) { i = Constant <value_ints = [0]> ()"
        " s = Shape <start = 1, end = 2>(x) d = Squeeze(s, i) u = Unsqueeze(d, i) t = Tan(x)"
        " r = Relu(x) f = Flatten <axis = 0>(r) q = Squeeze(f, i) y = Expand(q, u) z = Add(t, r) }"
    )
    report = lint(write_case(Case("g", "", body, 20), tmp_path), ["cuda", "cpu"])
    (cuda,) = (one for one in report.to_json()["verdicts"] if one["target"] == "cuda")
    assert cuda["nodes"] == {"gpu": 5, "cpu_shapes": 3, "cpu_others": 1, "constants": 1}
    verdicts = {target: report.describe_verdict(graph, target) for graph, target in report.checked}
    assert verdicts["cpu"] == "nothing found"
    words = (
        "5 nodes run on the GPU, 3 shape computations on the CPU, 1 others on the CPU, 1 when it is loaded"
    )
    assert verdicts["cuda"] == f"1 warning: {words}"
    good = write_case(Case("h", "", "(float[n] x) => (float[n] y) { y = Abs(x) }", 20), tmp_path)
    (row,) = (
        line for line in planforge("lint", good, "--target", "cuda").stdout.splitlines() if "cuda" in line
    )
    assert row.endswith("nothing found: 1 nodes run on the GPU, 0 shape computations on the CPU")


def test_every_node_of_a_quantized_graph_is_counted(tmp_path: Path) -> None:
    """A DequantizeLinear of a weight is no constant for ONNX Runtime, as its own optimizer shows."""
    body = (
        "(float[n,2] x) => (float[n,2] y) <int8[2,2] w = {1, 2, 3, 4}, float s = {0.5}>"
        " { d = DequantizeLinear(w, s) m = MatMul(x, d) y = Relu(m) }"
    )
    path = write_case(Case("g", "", body, 20), tmp_path)
    (placement,) = lint(path, ["cuda"]).placements.values()
    assert placement == Placement(gpu=3, cpu_shapes=0, cpu_others=0, constants=0)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    assert "DequantizeLinear" in {node.op_type for node in nodes}


def test_attention_without_a_kernel_on_a_gpu_is_told(tmp_path: Path) -> None:
    for dtype in ("float", "float16", "bfloat16"):
        path = write_case(Case(dtype, "", attend("t", dtype=dtype), 20, domains=MS), tmp_path)
        found = [f.what for f in lint(path, ["cuda"]).findings if f.rule == "computed-on-cpu"]
        assert len(found) == (dtype == "float"), dtype


@pytest.mark.parametrize(
    ("body", "domains", "words"),
    [
        ("(float[n] x) => (uint8[n] y, float s, uint8 z) { y, s, z = DynamicQuantizeLinear(x) }", (), "no"),
        ("(float16 a, float16 b, float16 c) => (float16[n] y) { y = Range(a, b, c) }", (), "for float16"),
        (
            "(float16[n,32] x, uint8[8,1,12] w, float16[8,1] s) => (float16[n,8] y)"
            " { y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 3, block_size = 32>(x, w, s) }",
            MS,
            "with bits 3, only 2, 4, 8",
        ),
        (
            "(float16[n,32] x, uint8[8,1,32] w, float16[8,1] s) => (float16[n,8] y)"
            " { y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 8, block_size = 32>(x, w, s) }",
            MS,
            "",
        ),
        (attend("t", dtype="float"), MS, "for float32, only for float16, bfloat16"),
        ("(float[n] x) => (float[n] y) { y = Tan(x) }", (), "Tan has no kernel on a GPU"),
        ("(float[n] x) => (float[n] y) { y = Acos(x) }", (), "Acos has no kernel on a GPU"),
        ("(int64[n] a, int64[n] b) => (int64[n] y) { y = BitwiseOr(a, b) }", (), "BitwiseOr has no kernel"),
        ("(float[n,4] x) => (float[n,4] y) { y = ai.onnx.ml.Scaler(x) }", ML, "ai.onnx.ml.Scaler has no"),
        ("(float16[n] x) => (float16[n] y) { y = LogSoftmax(x) }", (), ""),
        ("(float[n] x, float16[1] k) => (float16[n] y) { y = CastLike(x, k) }", (), ""),
        ("(bool[n] c, bool[n] a, bool[n] b) => (bool[n] y) { y = Where(c, a, b) }", (), "for bool, only for"),
        ("(float[n] x) => (int4[n] y) { y = Cast <to = 22>(x) }", (), "for a result in int4"),
        (
            "(float16[n] x, float16 s, uint16 z) => (uint16[n] y) { y = QuantizeLinear(x, s, z) }",
            (),
            "for uint16, only for int8",
        ),
        ("(float16[n] x, float16 s, int8 z) => (int8[n] y) { y = QuantizeLinear(x, s, z) }", (), ""),
        ("(uint8[n,4] x, int8[4,2] w) => (int32[n,2] y) { y = MatMulInteger(x, w) }", (), "for uint8"),
    ],
)  # fmt: skip
def test_what_a_gpu_has_no_kernel_for_is_told(
    body: str, domains: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    path = write_case(Case("g", "", body, 21, domains=domains), tmp_path)
    found = [finding for finding in lint(path, ["cuda"]).findings if finding.rule == "computed-on-cpu"]
    assert len(found) == bool(words) and all(words in finding.what for finding in found)
    assert all(finding.source and "computed on the CPU" in finding.what for finding in found)
    counted = count_kernels(path)
    assert counted is not None and counted.nodes == 1 and sum(counted.without.values()) == bool(words)
    assert "computed-on-cpu" not in {finding.rule for finding in lint(path, ["cpu", "rtx"]).findings}


def test_the_nodes_and_modules_without_a_kernel_are_named(tmp_path: Path) -> None:
    model = model_of(Case("g", "", "(float[n] x) => (float[n] y) { a = Tan(x) b = Tan(a) y = Abs(b) }", 20))
    for number, node in enumerate(model.graph.node):
        node.name = f"node_{number}"
        node.metadata_props.add(key="planforge.module", value=f"h.{number}.attn")
    onnx.save(model, tmp_path / "g.onnx")
    (found,) = (f for f in lint(tmp_path / "g.onnx", ["cuda"]).findings if f.rule == "computed-on-cpu")
    assert (found.operator, found.nodes, found.modules) == (
        "Tan",
        ("node_0", "node_1"),
        ("h.0.attn", "h.1.attn"),
    )
    assert found.where == "2 nodes: node_0, node_1 of h.0.attn, h.1.attn"
    assert found.to_json()["modules"] == ["h.0.attn", "h.1.attn"]


def test_of_a_function_in_the_model_its_own_nodes_are_judged(tmp_path: Path) -> None:
    for inner, count in (("Tan", 1), ("Abs", 0)):
        model = model_of(
            Case("g", "", "(float[n] x) => (float[n] y) { y = own.Turn(x) }", 20, domains=("own",))
        )
        imports = [onnx.helper.make_opsetid("", 20)]
        body = [onnx.helper.make_node(inner, ["a"], ["b"], name="inside")]
        model.functions.append(onnx.helper.make_function("own", "Turn", ["a"], ["b"], body, imports))
        onnx.save(model, tmp_path / "g.onnx")
        found = [f for f in lint(tmp_path / "g.onnx", ["cuda"]).findings if f.rule == "computed-on-cpu"]
        assert [f.operator for f in found] == [inner] * count


def test_nothing_of_an_export_has_no_kernel_but_what_is_for_a_cpu(
    demo_bundle: Path,
    llama_demo_bundle: Path,
    marian_bundle: Path,
    minilm_bundle: Path,
    dates_bundle: Path,
    head_bundle: Callable[[str], Path],
) -> None:
    """Attention on a cache in fp32, which an export for a GPU has in another form."""
    folders = (demo_bundle, llama_demo_bundle, marian_bundle, minilm_bundle, dates_bundle)
    seen: set[str] = set()
    for folder in (*folders, head_bundle("classifier"), head_bundle("distilled")):
        for path in folder.glob("onnx/*.onnx"):
            findings = lint(path, ["cuda"]).findings
            found = {f.what.partition(":")[0] for f in findings if f.rule == "computed-on-cpu"}
            is_for_cpu = ".ort.fp32" in path.name or ".ort.int" in path.name
            assert not found or is_for_cpu, path.name
            seen |= found
    attention = "com.microsoft.GroupQueryAttention has no kernel on a GPU"
    assert seen == {f"{attention} for float32, only for float16, bfloat16"}


def test_inspect_counts_what_a_gpu_has_no_kernel_for(demo_bundle: Path) -> None:
    kernels = {
        name: inspect(next(demo_bundle.glob(f"onnx/{name}-*"))).value["gpu_kernels"]
        for name in ("decoder.ort.fp32", "decoder.inplace.fp16")
    }
    assert kernels["decoder.ort.fp32"]["without"] == {"com.microsoft.GroupQueryAttention": 4}
    assert kernels["decoder.inplace.fp16"]["without"] == {}
    assert all(counted["nodes"] > 60 for counted in kernels.values())


def test_verification_refuses_what_a_gpu_would_compute_wrong(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    export("gpt2-demo", folder, target=["cuda"], precision=["fp16"], verify="quick")
    for number, bundle in enumerate((folder, compute_total_in_the_graph(folder, tmp_path / "old"))):
        opened = Bundle.open(bundle)
        failures = compare_structure(opened, opened.manifest.artifact("decoder.ort.fp16")).failures
        assert any("on the host before a GPU has computed" in text for text in failures) == bool(number)
