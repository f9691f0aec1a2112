"""`verify` of a single .onnx file, of whatever model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import onnx.parser
import pytest

from planforge.exporter import verify
from planforge.exporter.errors import VerificationError
from planforge.exporter.verification.structure import READING
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError, PlanForgeError

from ...helpers.cli import planforge
from ...helpers.faults import epsilon, perturbed
from ...helpers.graphs import replace_graph

MASKED = """
<ir_version: 10, opset_import: ["" : 20]>
masked (float[2, 4] x, bool[2, 4] keep) => (float[2, 4] y)
<float low = {LOW}, float zero = {0}, float factor = {FACTOR}>
{
  mask = Where (keep, zero, low)
  scores = Mul (x, factor)
  hidden = Add (scores, mask)
  y = Softmax <axis = -1> (hidden)
}
"""
CHOICE = """
<ir_version: 10, opset_import: ["" : 20]>
choice (float[2, 4] x, bool flag) => (float[2, 4] y)
<float factor = {FACTOR}>
{
  y = If (flag) <
    then_branch = twice () => (float[2, 4] a) { a = Mul (x, factor) },
    else_branch = same () => (float[2, 4] b) { b = Identity (x) }
  >
}
"""


REPEATED = """
<ir_version: 10, opset_import: ["" : 20]>
repeated (float[2, 4] x) => (float[2, 4] y)
<int64 times = {2}, float factor = {FACTOR}>
{
  y = Loop (times, , x) <
    body = once (int64 i, bool going, float[2, 4] a) => (bool on, float[2, 4] b) {
      on = Identity (going)
      b = Mul (a, factor)
    }
  >
}
"""


def write_file(path: Path, text: str, low: str = "-1e9", factor: str = "1") -> Path:
    model = onnx.parser.parse_model(text.replace("LOW", low).replace("FACTOR", factor))
    for tensor in model.graph.initializer:
        if tensor.name == "low":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array(low, np.float32), "low"))
    onnx.save(model, path)
    return path


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    keep = np.array([[True, False, True, True], [True, True, True, False]])
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    np.savez(tmp_path / "inputs.npz", x=x, keep=keep, flag=np.array(True))
    return tmp_path / "inputs.npz"


def test_a_mask_may_be_minus_infinity(tmp_path: Path, inputs: Path) -> None:
    sound = write_file(tmp_path / "a.onnx", MASKED, low="-inf")
    assert verify(sound, inputs=inputs).passed
    report = verify(write_file(tmp_path / "b.onnx", MASKED, "-inf", "1.5"), inputs=inputs, against=sound)
    (mismatch,) = report.mismatches
    assert (mismatch.op_type, mismatch.value) == ("Mul", "scores")
    assert verify(sound, inputs=inputs, against=write_file(tmp_path / "c.onnx", MASKED)).passed


def test_a_constant_node_may_be_minus_infinity(tmp_path: Path, inputs: Path) -> None:
    model = onnx.load(write_file(tmp_path / "a.onnx", MASKED, low="-inf"))
    (low,) = [tensor for tensor in model.graph.initializer if tensor.name == "low"]
    model.graph.initializer.remove(low)
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["low"], value=low))
    onnx.save(model, tmp_path / "b.onnx")
    assert verify(tmp_path / "b.onnx", inputs=inputs).passed


def test_what_a_mask_of_minus_infinity_makes_nan_is_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "none.npz", x=np.ones((2, 4), np.float32), keep=np.zeros((2, 4), bool))
    report = verify(write_file(tmp_path / "a.onnx", MASKED, low="-inf"), inputs=tmp_path / "none.npz")
    assert not report.passed
    assert "(Softmax, float32) gives nan" in report.comparisons[0].failures[0]


def test_the_branch_of_an_if_runs_node_by_node(tmp_path: Path, inputs: Path) -> None:
    one, same, other = (
        write_file(tmp_path / f"{name}.onnx", CHOICE, factor=factor)
        for name, factor in (("one", "2"), ("same", "2"), ("other", "3"))
    )
    report = verify(one, inputs=inputs)
    assert report.passed and report.against == "itself node by node"
    assert verify(one, inputs=inputs, against=same).passed
    report = verify(one, inputs=inputs, against=other)
    assert not report.passed
    assert [mismatch.op_type for mismatch in report.mismatches] == ["Mul"]
    np.savez(inputs, **{**np.load(inputs), "flag": np.array(False)})
    assert verify(one, inputs=inputs, against=other).passed  # the other branch


def test_nodes_that_hold_other_graphs_run_on_onnx_runtime_alone(tmp_path: Path, inputs: Path) -> None:
    one, same, other = (
        write_file(tmp_path / f"{name}.onnx", REPEATED, factor=factor)
        for name, factor in (("one", "2"), ("same", "2"), ("other", "3"))
    )
    with pytest.raises(VerificationError, match=r"cannot be run node by node.*\(Loop\) holds.*--against"):
        verify(one, inputs=inputs)
    report = verify(one, inputs=inputs, against=same)
    assert report.passed
    assert report.against == "same.onnx"
    assert not verify(one, inputs=inputs, against=other).passed


HEAD = '<ir_version: 10, opset_import: ["" : 20]>'


def of_text(path: Path, text: str) -> Path:
    onnx.save(onnx.parser.parse_model(text), path)
    return path


@pytest.mark.parametrize(
    ("mask", "overflows"),
    [([10000, -np.inf, 0, 0], True), ([0, -np.inf, 0, 0], False), ([10000, 0, 0, 0], True)],
)
def test_an_infinity_beside_a_mask_is_still_one(tmp_path: Path, mask: list[float], overflows: bool) -> None:
    text = f"{HEAD} g (float16[1, 4] x, float16[4] m) => (float16[1, 4] y) {{ a = Add (x, m) y = Tanh (a) }}"
    np.savez(tmp_path / "in.npz", x=np.full((1, 4), 60000, np.float16), m=np.array(mask, np.float16))
    report = verify(of_text(tmp_path / "a.onnx", text), inputs=tmp_path / "in.npz")
    assert report.passed == (not overflows)


@pytest.mark.parametrize(
    "body",
    [
        "g (float[2, 4] x) => (float[2, 4] y) <float far = {100}> { a = Sub (x, far) y = Relu (a) }",
        "g (float[1, 1] x) => (float[1, 1] y) <float one = {1}> { y = Add (x, one) }",
        "g (float[2, 4] x) => (float[2, 4] y) <float[1] w = {2}> { y = Mul (x, w) }",
    ],
)
def test_zeros_and_single_numbers_are_no_fault(tmp_path: Path, body: str) -> None:
    assert verify(of_text(tmp_path / "a.onnx", f"{HEAD} {body}")).passed


def test_a_single_number_in_fp16_is_held_to_its_own_size(tmp_path: Path) -> None:
    full, half = (
        of_text(
            tmp_path / f"{kind}.onnx",
            f"{HEAD} g ({kind}[1, 1] x) => ({kind}[1, 1] y) {{ y = Sigmoid (x) }}",
        )
        for kind in ("float", "float16")
    )
    assert verify(half, against=full).passed


def test_masked_outputs_may_be_minus_infinity(tmp_path: Path, inputs: Path) -> None:
    text = MASKED.replace("Softmax <axis = -1>", "Identity")
    assert verify(write_file(tmp_path / "a.onnx", text, low="-inf"), inputs=inputs).passed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("g (float[2, 5] x) => (float[2, 5] y) { y = Tanh (x) }", r"'x' needs .*\(2, 4\)"),
        ("g (float[2, 4] xx) => (float[2, 4] y) { y = Tanh (xx) }", "has xx: give files"),
        ("g (string[2] x) => (string[2] y) { y = Identity (x) }", "x"),
    ],
)
def test_files_that_do_not_take_the_same_are_refused(tmp_path: Path, text: str, words: str) -> None:
    one = of_text(tmp_path / "one.onnx", f"{HEAD} g (float[2, 4] x) => (float[2, 4] y) {{ y = Tanh (x) }}")
    with pytest.raises(PlanForgeError, match=words):
        verify(one, against=of_text(tmp_path / "other.onnx", f"{HEAD} {text}"))
    with pytest.raises(VerificationError, match="is not there"):
        verify(one, against=tmp_path / "none.onnx")


def test_weights_are_compared_where_made_up_inputs_do_not_fit(tmp_path: Path) -> None:
    """Gather of entry 7 of 4: random inputs cannot run it."""
    for name, second in (("one", 2), ("two", 3)):
        of_text(
            tmp_path / f"{name}.onnx",
            f"{HEAD} g (int64[2] i, float[2, 4] x) => (float[2, 4] y)"
            f" <float[4, 4] w = {{{', '.join(['1', str(second)] * 8)}}}, int64 far = {{7}}>"
            " { j = Add (i, far) e = Gather (w, j) y = Add (e, x) }",
        )
    with pytest.raises(VerificationError, match="--inputs"):
        verify(tmp_path / "one.onnx")
    report = verify(tmp_path / "one.onnx", against=tmp_path / "two.onnx")
    unfit, read = report.comparisons
    assert "--inputs" in unfit.failures[0]
    assert "8 of 16 values, first at [0, 1]" in read.failures[0]


def test_an_output_of_one_file_only_fails(tmp_path: Path) -> None:
    one, two = (
        of_text(
            tmp_path / f"{n}.onnx", f"{HEAD} g (float[2, 4] x) => ({outputs}) {{ y = Tanh (x) z = Relu (x) }}"
        )
        for n, outputs in ((1, "float[2, 4] y"), (2, "float[2, 4] y, float[2, 4] z"))
    )
    for pair in ((one, two), (two, one)):
        failures = [f for c in verify(pair[0], against=pair[1]).comparisons for f in c.failures]
        assert failures == ["z: is an output of one file only"]


SEQUENCE = f"""{HEAD} g (float[4, 2] x) => (float[4, 2] y) {{
  s = SplitToSequence <axis = 0> (x)
  y = ConcatFromSequence <axis = 0> (s)
}}"""
FUNCTION = """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[2, 4] x) => (float[2, 4] y) { y = my.twice (x) }
<domain: "my", opset_import: ["" : 20]>
twice (a) => (b) { b = Add (a, a) }"""


def test_what_cannot_run_alone_is_compared_on_onnx_runtime(tmp_path: Path) -> None:
    sequence = of_text(tmp_path / "sequence.onnx", SEQUENCE)
    with pytest.raises(VerificationError, match=r"SplitToSequence\) gives a sequence.*--against"):
        verify(sequence)
    assert verify(sequence, against=sequence).passed
    assert verify(of_text(tmp_path / "function.onnx", FUNCTION)).passed  # which is inlined


def test_weights_may_be_listed_among_the_inputs(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        f"{HEAD} g (float[2, 4] x, float[4] w) => (float[2, 4] y) {{ y = Mul (x, w) }}"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "w"))
    onnx.save(model, tmp_path / "old.onnx")
    assert verify(tmp_path / "old.onnx").passed


def test_a_coarser_fp16_file_is_not_excused_by_a_cap(demo_bundle: Path, tmp_path: Path, feeds: Path) -> None:
    """Limits come from what rounding does to the other file, and both are read."""
    bundle = Bundle.open(demo_bundle)
    full, half = (
        bundle.path(bundle.manifest.artifact(f"decoder.portable.{p}").file) for p in ("fp32", "fp16")
    )
    report = verify(half, against=full, inputs=feeds)
    assert report.passed
    (read,) = [c for c in report.comparisons if c.backend == READING]
    assert read.case.startswith(f"attributes and {read.metrics['weights']} of ")
    assert all(
        limit < 0.02 for c in report.comparisons for name, limit in c.limits.items() if "logits" in name
    )
    own = Path(shutil.copytree(demo_bundle, tmp_path / "own"))
    replace_graph(own, "decoder.portable.fp16", perturbed("h.3.attn.c_attn"))
    damaged = own / bundle.manifest.artifact("decoder.portable.fp16").file
    for other in (full, half):
        failures = [f for c in verify(damaged, against=other, inputs=feeds).comparisons for f in c.failures]
        assert any(": max_error is" in f for f in failures), failures
        assert any("of h.3.attn.c_attn is not that of" in f for f in failures), failures
    replace_graph(own, "decoder.portable.fp16", epsilon("h.1.ln_1", 1e-2))
    readings = [c for c in verify(damaged, against=full, inputs=feeds).comparisons if c.backend == READING]
    assert any("of h.1.ln_1 has epsilon 0.01, in" in failure for c in readings for failure in c.failures)


@pytest.fixture
def feeds(demo_bundle: Path, tmp_path: Path) -> Path:
    """A prefill of the demo's portable graph."""
    artifact = Bundle.open(demo_bundle).manifest.artifact("decoder.portable.fp32")
    arrays = {
        "input_ids": np.arange(5, 21)[None],
        "attention_mask": np.ones((1, 16), np.int64),
        "position_ids": np.arange(16)[None],
        "logit_rows": np.arange(16),
    }
    for spec in artifact.inputs:
        if spec.role.startswith("past."):
            _, heads, _, size = spec.axis_names()
            arrays[spec.name] = np.zeros((1, int(heads), 0, int(size)), np.float32)
    np.savez(tmp_path / "feeds.npz", **arrays)  # type: ignore[arg-type]
    return tmp_path / "feeds.npz"


def test_what_could_not_be_verified_leaves_no_green_file(own_bundle: Path, tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    page = tmp_path / "page.html"
    junit.write_text("<testsuites/>")
    (own_bundle / Bundle.open(own_bundle).manifest.artifacts[0].file).write_bytes(b"damaged")
    done = planforge("verify", own_bundle, "--junit", junit, "--report", page)
    assert done.returncode == 1
    failure = ElementTree.parse(junit).getroot().find(".//failure")
    assert failure is not None
    assert "has changed" in str(failure.get("message")) or "bytes" in str(failure.get("message"))
    assert "FAILED" in page.read_text(encoding="utf-8").upper()


def test_a_file_that_onnx_runtime_cannot_load_fails_and_is_reported(tmp_path: Path, inputs: Path) -> None:
    broken = write_file(tmp_path / "broken.onnx", MASKED.replace("Softmax", "Sofmax"))
    junit = tmp_path / "junit.xml"
    page = tmp_path / "page.html"
    done = planforge("verify", broken, "--inputs", inputs, "--junit", junit, "--report", page, "--json")
    assert done.returncode == 1
    (comparison,) = json.loads(done.stdout)["comparisons"]
    assert "cannot load broken.onnx" in comparison["failures"][0]
    assert "Sofmax" in page.read_text(encoding="utf-8")
    assert ElementTree.parse(junit).getroot().find(".//failure") is not None


def test_an_onnx_file_of_any_model_is_held_against_itself_and_another(
    minilm_bundle: Path, tmp_path: Path
) -> None:
    bundle = Bundle.open(minilm_bundle)
    sound = bundle.path(bundle.manifest.artifacts[0].file)
    report = verify(sound)
    assert report.passed
    assert report.against == "itself node by node"
    own = Path(shutil.copytree(minilm_bundle, tmp_path / "own"))
    replace_graph(own, bundle.manifest.artifacts[0].id, perturbed("layers.2.attention.output"))
    damaged = own / bundle.manifest.artifacts[0].file
    report = verify(damaged, against=sound)
    assert not report.passed
    (mismatch,) = report.mismatches
    assert (mismatch.module, mismatch.layer) == ("layers.2.attention.output", 2)
    assert mismatch.artifact == damaged.name


@pytest.mark.parametrize(
    "choice",
    [{"source": "m"}, {"prompts": "p"}, {"only": ["a"]}, {"seed": 1}, {"level": "full"}],
    ids=str,
)
def test_what_decides_nothing_of_an_onnx_file_is_refused(choice: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"{next(iter(choice))}.* for a bundle, not for an \.onnx file"):
        verify(tmp_path / "model.onnx", **choice)


def test_what_an_onnx_file_cannot_be_run_with_is_said(demo_bundle: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(demo_bundle)
    decoder = bundle.path(bundle.manifest.artifact("decoder.portable.fp32").file)
    with pytest.raises(VerificationError, match=r"--inputs FILE\.npz"):
        verify(decoder)  # its axes depend on each other, which its shapes do not say
    np.savez(tmp_path / "some.npz", input_ids=np.ones((1, 2), np.int64))
    with pytest.raises(InputError, match="no array 'attention_mask'"):
        verify(decoder, inputs=tmp_path / "some.npz")
    (tmp_path / "none.npz").write_text("no archive")
    with pytest.raises(InputError, match=r"cannot be read as \.npz"):
        verify(decoder, inputs=tmp_path / "none.npz")
    (tmp_path / "text.onnx").write_text("no graph")
    with pytest.raises(VerificationError, match="is not an ONNX file"):
        verify(tmp_path / "text.onnx")
    with pytest.raises(InputError, match=r"\.onnx file"):
        verify(demo_bundle, inputs=tmp_path / "some.npz")


def ends_of_attributes(longer: list[float], other: list[float]) -> list[onnx.NodeProto]:
    """Nodes in pairs whose attributes differ at their end alone: lists and tensors."""
    as_tensors = [onnx.numpy_helper.from_array(np.array(values, np.float32)) for values in (longer, other)]
    nodes = []
    kinds: dict[str, list[Any]] = {"value": as_tensors, "value_floats": [longer, other]}
    for kind, pair in kinds.items():
        for number, value in enumerate(pair):
            named: dict[str, Any] = {kind: value}
            nodes.append(onnx.helper.make_node("Constant", [], [f"{kind}_{number}"], **named))
    nodes.append(onnx.helper.make_node("Sum", [node.output[0] for node in nodes], ["constants"]))
    nodes.append(onnx.helper.make_node("Add", ["x", "constants"], ["sum"]))
    for number, values in enumerate((longer, other)):
        ends: dict[str, Any] = {"offset": values, "scale": [1.0 + value for value in values]}
        nodes.append(onnx.helper.make_node("Scaler", ["sum"], [f"scaled_{number}"], domain=ML, **ends))
    return nodes


ML = "ai.onnx.ml"


def test_nodes_whose_attributes_differ_at_the_end_alone_are_two(tmp_path: Path) -> None:
    """Printed, a list or an array may be cut short, and two nodes would be taken for one."""
    longer = [float(n) for n in range(24)]
    nodes = ends_of_attributes(longer, [*longer[:-1], 99.0])
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 24])
    results = [
        onnx.helper.make_tensor_value_info(f"scaled_{number}", onnx.TensorProto.FLOAT, [2, 24])
        for number in (0, 1)
    ]
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid(ML, 3)]
    graph = onnx.helper.make_graph(nodes, "g", [x], results)
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "a.onnx")
    report = verify(tmp_path / "a.onnx")
    assert report.passed, report.comparisons
