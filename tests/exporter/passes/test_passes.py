"""Graph passes on graphs written as ONNX text, executed by ONNX Runtime and compared with numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx.shape_inference
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from planforge.exporter.errors import ExportError
from planforge.exporter.passes.fp16 import convert_to_fp16
from planforge.exporter.passes.weights import attach_parameters, save_with_shared_weights
from planforge.exporter.tracing.graph_check import check_graph, name_axes
from planforge.runtime.bundle.manifest import Axis, TensorSpec

LINEAR = """
<ir_version: 10, opset_import: ["" : 20]>
linear (float[n, 4] x, float[6, 4] weight, float[6] bias) => (float[n, 6] y, float[n, 6] z)
{
    turned = Transpose <perm = [1, 0]> (weight)
    product = MatMul (x, turned)
    y = Add (product, bias)
    z = Relu (y)
}
"""
NORMED = """
<ir_version: 10, opset_import: ["" : 20]>
normed (float[n, 8] x) => (float[n, 8] y, float[n, 8] logits)
<float[8] scale = {1, 2, 3, 4, 5, 6, 7, 8}, float[8] shift = {0, 1, 0, 1, 0, 1, 0, 1}, float half = {0.5}>
{
    normal = LayerNormalization (x, scale, shift)
    halved = Mul (normal, half)
    again = LayerNormalization (halved, scale, shift)
    y = Add (halved, again)
    logits = Mul (y, half)
}
"""


def graph(text: str) -> ir.Model:
    proto = onnx.parser.parse_model(text)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def run(model: ir.Model, **inputs: np.ndarray) -> list[Any]:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    return session.run(None, inputs)  # type: ignore[no-any-return]


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(6, 4, generator=generator),
        "bias": torch.randn(6, generator=generator),
    }


def test_attached_weights_compute_the_same() -> None:
    model = graph(LINEAR)
    parameters = weights()
    attach_parameters(model, parameters)
    assert [value.name for value in model.graph.inputs] == ["x"]
    x = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    expected = torch.nn.functional.linear(torch.from_numpy(x), parameters["weight"], parameters["bias"])
    np.testing.assert_allclose(run(model, x=x)[0], expected.numpy(), rtol=1e-5, atol=1e-6)


def test_a_weight_read_transposed_only_is_stored_transposed() -> None:
    model = graph(LINEAR)
    attach_parameters(model, weights())
    assert "Transpose" not in [node.op_type for node in model.graph]
    assert list(model.graph.initializers["weight.transposed"].shape or ()) == [4, 6]


def test_a_weight_read_both_ways_is_stored_as_it_is() -> None:
    text = LINEAR.replace("z = Relu (y)", "z = MatMul (y, mixed)\n mixed = MatMul (weight, turned)")
    lines = text.replace(
        "z = MatMul (y, mixed)\n mixed = MatMul (weight, turned)",
        "mixed = MatMul (weight, turned)\n z = MatMul (y, mixed)",
    )
    model = graph(lines)
    attach_parameters(model, weights())
    assert list(model.graph.initializers["weight"].shape or ()) == [6, 4]
    assert "Transpose" in [node.op_type for node in model.graph]


def test_graphs_of_one_precision_share_one_weights_file(tmp_path: Path) -> None:
    parameters = {name: value.repeat(64, *[1] * (value.dim() - 1)) for name, value in weights().items()}
    text = LINEAR.replace("[6, 4]", "[384, 4]").replace("[6]", "[384]").replace("n, 6]", "n, 384]")
    models = {"a.onnx": graph(text), "b.onnx": graph(text)}
    for model in models.values():
        attach_parameters(model, parameters)
    save_with_shared_weights(models, tmp_path, "w.data")
    assert (tmp_path / "w.data").stat().st_size < 1.2 * sum(p.nbytes for p in parameters.values())
    x = np.ones((2, 4), np.float32)
    expected = torch.nn.functional.linear(torch.from_numpy(x), parameters["weight"], parameters["bias"])
    for name in models:
        assert (tmp_path / name).stat().st_size < 2000
        onnx.checker.check_model(str(tmp_path / name), full_check=True)
        got = ort.InferenceSession(tmp_path / name).run(None, {"x": x})[0]
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_fp16_keeps_normalization_in_fp32_and_types_everything() -> None:
    model = graph(NORMED)
    convert_to_fp16(model, fp32_values=["logits"])
    onnx.checker.check_model(ir.to_proto(model), full_check=True)  # the types are consistent
    types = {str(v.name): v.dtype for v in (*model.graph.inputs, *model.graph.outputs)}
    half = ir.DataType.FLOAT16
    single = ir.DataType.FLOAT
    assert types == {"x": half, "y": half, "logits": single}
    for node in model.graph:
        wanted = single if node.op_type == "LayerNormalization" else half
        if node.op_type != "Cast":
            assert {value.dtype for value in node.inputs if value is not None} == {wanted}


def test_fp16_computes_the_same_within_its_rounding() -> None:
    x = np.random.default_rng(1).standard_normal((5, 8), np.float32).astype(np.float16)
    single = graph(NORMED)
    half = graph(NORMED)
    convert_to_fp16(half, fp32_values=["logits"])
    expected = run(single, x=x.astype(np.float32))
    for got, want in zip(run(half, x=x), expected, strict=True):
        # A handful of roundings, each of half a unit in the last of fp16's 11 bits.
        np.testing.assert_allclose(got.astype(np.float32), want, atol=8 * 2**-11 * np.abs(want).max())


def test_fp16_needs_types() -> None:
    with pytest.raises(ValueError, match=r"no type.*normal"):
        convert_to_fp16(ir.from_proto(onnx.parser.parse_model(NORMED)), fp32_values=[])


def test_fp16_casts_a_value_once_for_all_its_users() -> None:
    text = NORMED.replace(
        "again = LayerNormalization (halved, scale, shift)",
        "other = LayerNormalization (halved, scale, shift)\n"
        "again = LayerNormalization (halved, shift, scale)",
    ).replace("y = Add (halved, again)", "both = Add (other, again)\n y = Add (halved, both)")
    model = graph(text)
    convert_to_fp16(model, fp32_values=["logits"])
    read = [node.inputs[0] for node in model.graph if node.op_type == "Cast"]
    assert len(read) == len(set(read))


def test_fp16_leaves_a_clones_original_alone() -> None:
    original = graph(NORMED)
    before = ir.to_proto(original).SerializeToString()
    convert_to_fp16(original.clone(), fp32_values=["logits"])
    assert ir.to_proto(original).SerializeToString() == before


@pytest.mark.parametrize("value", ["70000", "-70000"])
def test_what_reads_a_constant_that_fp16_cannot_hold_stays_in_fp32(value: str) -> None:
    model = graph(NORMED.replace("{0.5}", f"{{{value}}}"))
    convert_to_fp16(model, fp32_values=["logits"])
    half = model.graph.initializers["half"]
    assert half.dtype == ir.DataType.FLOAT
    readers = {node for node, _ in half.uses()}
    assert readers
    assert all(node.outputs[0].dtype == ir.DataType.FLOAT for node in readers)


def specs() -> tuple[list[TensorSpec], list[TensorSpec]]:
    rows = Axis("n", 1, 1, 8)
    inputs = [
        TensorSpec("x", "ids", "float32", (rows, 4)),
        TensorSpec("weight", "w", "float32", (6, 4)),
        TensorSpec("bias", "b", "float32", (6,)),
    ]
    return inputs, [TensorSpec(name, name, "float32", (rows, 6)) for name in ("y", "z")]


def test_the_check_passes_the_graph_that_was_meant() -> None:
    check_graph(graph(LINEAR), *specs())


@pytest.mark.parametrize(
    ("was", "becomes", "words"),
    [
        (
            "float[n, 6] z)",
            "float[n, 6] other)",
            "outputs are .'y', 'other'., expected .'y', 'z'.",
        ),
        ("float[n, 6] y", "double[n, 6] y", "output y is float64, expected float32"),
        ("float[n, 6] y", "float[m, 6] y", r"output y has axes \('m', 6\), expected \('n', 6\)"),
        ("float[n, 4] x", "float[3, 4] x", r"input x has axes \(3, 4\), expected \('n', 4\)"),
        ("Add (product, bias)", "Relu (product)", "input 'bias' is used by no node"),
    ],
)
def test_the_check_names_what_differs(was: str, becomes: str, words: str) -> None:
    text = LINEAR.replace(was, becomes).replace(
        "z = Relu", "other = Relu" if "other" in becomes else "z = Relu"
    )
    with pytest.raises(ExportError, match=words):
        check_graph(graph(text), *specs())


LENGTHS = {"n": 8, "past": 5, "tokens": 3, "rows": 4}


@pytest.mark.parametrize("computed", ["tokens + past", "2*rows", "4*((past - 1)//2)", "(16//2)"])
def test_output_axes_get_the_names_of_the_recipe(computed: str) -> None:
    model = graph(LINEAR)
    model.graph.outputs[0].shape = ir.Shape([computed, 6])
    name_axes(model, specs()[1], LENGTHS)
    check_graph(model, *specs())


def test_another_sum_keeps_its_name_and_is_found() -> None:
    model = graph(LINEAR)
    model.graph.outputs[0].shape = ir.Shape(["past + rows", 6])
    name_axes(model, specs()[1], LENGTHS)
    with pytest.raises(ExportError, match=r"past \+ rows"):
        check_graph(model, *specs())
