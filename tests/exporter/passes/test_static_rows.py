"""Products of 8-bit rows and weights, as plans have them: onnx's own evaluator says what they compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from planforge.exporter.errors import BuildError
from planforge.exporter.execution.node_executor import NodeExecutor
from planforge.exporter.number_formats import FP8, PLAN_INT8, NumberFormat
from planforge.exporter.passes.fp16 import convert_to_fp16
from planforge.exporter.passes.fp16_ranges import Fp32Reason
from planforge.exporter.passes.int8_rows import StaticRule, find_linears, read_rule
from planforge.exporter.passes.quantize import QuantizedWeights
from planforge.exporter.passes.static_rows import (
    choose_static_product,
    find_source,
    list_rounding,
    split_product,
)
from planforge.exporter.passes.storage import read_weights
from planforge.exporter.passes.store_dequantized import store
from planforge.exporter.precisions import PRECISIONS
from planforge.exporter.tensorrt.build import PlanRequest, build_plan
from planforge.exporter.tensorrt.profiles import Profile
from planforge.runtime.bundle.manifest import Artifact, Axis, TensorSpec

from ...helpers.graphs import nodes, parse_graph
from ..tensorrt.test_hardware import needs_rtx

Array = npt.NDArray[np.float32]
K, N = 64, 32
FORMATS = {"w8a8": PLAN_INT8, "fp8a8": FP8}
PRECISIONS_OF_ROWS = pytest.mark.parametrize("precision", FORMATS)
WEIGHT = f"float[{K},{N}]"
ZEROS = f"{{{','.join(['0'] * (K * N))}}}"
TWO = (
    f"(float[batch,tokens,{K}] x) => (float[batch,tokens,{N}] y, float[batch,tokens,{N}] z)"
    f" <{WEIGHT} w = {ZEROS}, {WEIGHT} v = {ZEROS}> {{ y = MatMul(x, w) z = MatMul(x, v) }}"
)


def draw(*shape: int, seed: int = 3) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def draw_rows(count: int = 64) -> Array:
    """Rows as a LayerNorm gives them: two columns reach ten times further than the others."""
    x = draw(count, K, seed=5)
    x[:, [7, 40]] *= 20
    return x


def make(
    precision: str,
    choices: dict[str, Fp32Reason] | None = None,
    x: Array | None = None,
    is_half: bool = True,
) -> tuple[ir.Model, QuantizedWeights]:
    """Two products of the same rows (B, T, K) with both factors in 8 bits, in fp16 or fp32."""
    model = parse_graph(f'<ir_version: 10, opset_import: ["" : 20]> g {TWO}')
    arrays = {"w": draw(N, K), "v": draw(N, K, seed=4)}
    for name, array in arrays.items():
        model.graph.initializers[name].const_value = ir.tensor(np.ascontiguousarray(array.T), name=name)
    (linears,) = find_linears(model.graph)
    product = choose_static_product(
        draw_rows() if x is None else x, linears.join_weights(), FORMATS[precision]
    )
    formats = PRECISIONS[precision].formats
    read = {name: lambda array=array: array for name, array in arrays.items()}
    weights = QuantizedWeights(8, 0, {}, read, products=split_product(product, linears), formats=formats)
    store(model, weights)
    if is_half:
        convert_to_fp16(model, [], choices)
    return model, weights


def evaluate(model: ir.Model, x: npt.NDArray[Any]) -> list[Any]:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return list(ReferenceEvaluator(proto).run(None, {"x": x}))


@PRECISIONS_OF_ROWS
def test_codes_are_multiplied_as_the_rule_says(precision: str) -> None:
    model, weights = make(precision, is_half=False)
    x = draw_rows(6).reshape(2, 3, K)
    for name, found in zip(("w", "v"), evaluate(model, x), strict=True):
        product = weights.products[name,]
        # Two columns are far larger than others, which costs codes of floats nothing.
        assert (product.smoothing is not None) == (precision == "w8a8")
        smoothed = x if product.smoothing is None else x * (1 / product.smoothing)
        steps = smoothed / np.float32(product.rule.step)
        if precision == "w8a8":
            codes = np.clip(np.rint(steps), -128, 127)
        else:
            codes = np.clip(steps, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        exact = (codes * product.rule.step) @ product.weight.dequantize().T.astype(np.float64)
        scale = np.abs(exact).max()
        np.testing.assert_allclose(found, exact, atol=scale * K * 2.0**-24, rtol=0)


@PRECISIONS_OF_ROWS
def test_the_products_are_close_to_those_of_floats(precision: str) -> None:
    """Each factor is off by a uniform draw between two codes, whose variance is a twelfth of their gap's."""
    model, weights = make(precision)
    x = draw_rows(64)
    found = evaluate(model, x[None].astype(np.float16))
    for name, array, weight in zip("wv", found, (draw(N, K), draw(N, K, seed=4)), strict=True):
        product = weights.products[name,]
        assert product.rule.step is not None
        s = np.ones(K, np.float32) if product.smoothing is None else product.smoothing
        format = FORMATS[precision]
        rows = x / s
        scale = product.weight.scale
        of_rows = (format.measure_gaps(rows / np.float32(product.rule.step)) * product.rule.step) ** 2 / 12
        of_weight = (format.measure_gaps(weight * s / scale) * scale) ** 2 / 12
        expected = of_rows @ np.square(weight * s).T + np.square(rows) @ of_weight.T
        lost = np.square(array[0] - x @ weight.T)
        assert 0.7 < lost.sum() / expected.sum() < 1.4


@PRECISIONS_OF_ROWS
def test_what_is_stored_is_read_back(precision: str) -> None:
    model, weights = make(precision)
    stored = read_weights(model.graph)
    assert [weight.names for weight in stored] == [("w",), ("v",)]
    assert len(nodes(model, "QuantizeLinear")) == 1  # of the rows, which are shared
    for weight in stored:
        product = weights.products[weight.names]
        assert weight.rows is not None and not weight.faults
        if product.smoothing is not None:
            np.testing.assert_array_equal(weight.rows.smoothing, product.smoothing)
        np.testing.assert_array_equal(weight.read(slice(None)).codes, product.weight.codes)
        np.testing.assert_array_equal(weight.read(slice(None)).scale, product.weight.scale)
        for value in weight.rows.steps:
            assert value is not None and value.const_value is not None
            assert float(value.const_value.numpy()) == product.rule.step
    product_node = nodes(model, "MatMul")[0]
    rows = product_node.inputs[0]
    assert rows is not None and find_source(rows) is model.graph.inputs[0]
    rounding = ["DequantizeLinear", "QuantizeLinear", *(["Mul"] if precision == "w8a8" else [])]
    assert [node.op_type for node in list_rounding(product_node)] == rounding


def read_raw(product: ir.Node, model: ir.Model) -> None:
    product.replace_input_with(0, model.graph.inputs[0])


def round_by_another_step(product: ir.Node, model: ir.Model) -> None:
    """Let the product read rows of their own Q and DQ, of another step in the latter."""
    dequantize = nodes(model, "DequantizeLinear")[0]
    step = ir.Value(name="other", const_value=ir.tensor(np.float16(0.5), name="other"))
    model.graph.register_initializer(step)
    own = ir.node("DequantizeLinear", [dequantize.inputs[0], step, *dequantize.inputs[2:]], name="own")
    model.graph.insert_before(product, own)
    product.replace_input_with(0, own.outputs[0])


def read_codes(product: ir.Node, model: ir.Model) -> None:
    dequantize = next(n for n in nodes(model, "DequantizeLinear") if "planforge.weight" in n.metadata_props)
    codes = dequantize.inputs[0]
    assert codes is not None
    model.graph.append(ir.node("Cast", [codes], {"to": int(ir.DataType.FLOAT)}, name="raw"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, None),
        (read_raw, "is read by '{}' and '{}', which round their rows differently"),
        (round_by_another_step, "is read by '{}' and '{}', which round their rows differently"),
        (read_codes, "has codes that 'raw' (Cast) reads as they are"),
    ],
)
def test_each_reader_of_a_shared_weight_is_looked_at(
    change: Callable[[ir.Node, ir.Model], None] | None, words: str | None
) -> None:
    model, _ = make("w8a8")
    first, second = nodes(model, "MatMul")
    second.replace_input_with(1, first.inputs[1])  # v's product reads w
    if change is not None:
        change(second, model)
    shared = next(weight for weight in read_weights(model.graph) if weight.names == ("w",))
    assert list(shared.faults) == ([] if words is None else [words.format(first.name, second.name)])


@PRECISIONS_OF_ROWS
def test_node_by_node_it_computes_what_onnx_says(precision: str) -> None:
    model, _ = make(precision)
    x = draw_rows(6).reshape(2, 3, K).astype(np.float16)
    found = NodeExecutor(model).run({"x": x})
    for name, expected in zip(("y", "z"), evaluate(model, x), strict=True):
        scale = np.abs(expected.astype(np.float32)).max()
        # Sums in fp16, and quotients: one that is nearly between two codes may become either.
        np.testing.assert_allclose(found[name], expected, atol=float(scale) * 0.01)


def test_rows_that_fp16_cannot_hold_are_rounded_in_fp32() -> None:
    choices = {"node_0": Fp32Reason(reads="x"), "node_1": Fp32Reason(reads="x")}
    model, _ = make("w8a8", choices, draw_rows() * 1e4)
    (quantize,) = nodes(model, "QuantizeLinear")
    assert quantize.inputs[1] is not None and quantize.inputs[1].dtype == ir.DataType.FLOAT
    assert all(node.outputs[0].dtype == ir.DataType.FLOAT for node in nodes(model, "DequantizeLinear"))


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_smoothing_is_left_out_where_columns_are_alike(format: NumberFormat) -> None:
    """It costs a product over the rows."""
    assert choose_static_product(draw(64, K), draw(K, N), format).smoothing is None


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_step_is_one_that_fp16_holds_and_is_written_down(format: NumberFormat) -> None:
    rule = StaticRule.of(draw(8, K) * 3, format, 1.25)
    assert rule.step == float(np.float16(rule.step))
    assert rule.step == pytest.approx(np.abs(draw(8, K) * 3).max() * 1.25 / format.top, rel=2.0**-11)
    assert read_rule({**vars(rule), "smoothed": False, "error": 0.1}) == rule
    assert StaticRule.of(np.zeros((2, 2), np.float32), format, 1.0).step > 0  # else a division by zero


def test_what_is_beyond_the_top_code_is_clipped() -> None:
    rule = StaticRule(0.5, 1.0, "fp8")
    x = np.array([[1e6, -1e6, 0.5]], np.float32)
    np.testing.assert_array_equal(rule.round_rows(x), [[224, -224, 0.5]])


def request_plan(model: ir.Model, sms: list[str], folder: Path) -> PlanRequest:
    ir.save(model, folder / "g.onnx")
    batch, tokens = Axis("batch", 1, 1, 4), Axis("tokens", 1, 8, 8)
    inputs = (TensorSpec("x", "x", "float16", (batch, tokens, K)),)
    outputs = tuple(TensorSpec(name, name, "float16", (batch, tokens, N)) for name in "yz")
    artifact = Artifact("encoder", "portable", "w8a8", 20, "g.onnx", (), "right", inputs, outputs)
    profile = Profile("all", {"batch": (1, 1, 4), "tokens": (1, 8, 8)})
    return PlanRequest(folder / "g.onnx", artifact, [profile], folder / "g.plan", sms=sms)


@needs_rtx
@pytest.mark.parametrize(("precision", "sms"), [("w8a8", ["sm75", "sm89"]), ("fp8a8", ["sm89", "sm120"])])
def test_tensorrt_builds_it(precision: str, sms: list[str], tmp_path: Path) -> None:
    model, _ = make(precision)
    plan = build_plan(request_plan(model, sms, tmp_path))
    assert plan.sms == tuple(sms) and (tmp_path / "g.plan").stat().st_size > 0


@needs_rtx
def test_tensorrt_itself_has_no_fp8_before_sm89(tmp_path: Path) -> None:
    model, _ = make("fp8a8")
    with pytest.raises(BuildError, match="in a type that sm86 does not have"):
        build_plan(request_plan(model, ["sm86"], tmp_path))


@needs_rtx
@pytest.mark.parametrize("step", [0.0, -0.1, float("nan")])
def test_tensorrt_takes_no_step_that_is_none(step: float, tmp_path: Path) -> None:
    model, _ = make("w8a8")
    (quantize,) = nodes(model, "QuantizeLinear")
    assert quantize.inputs[1] is not None
    quantize.inputs[1].const_value = ir.tensor(np.float16(step), name=quantize.inputs[1].name)
    with pytest.raises(BuildError, match="Scale coefficients must all be positive"):
        build_plan(request_plan(model, ["sm86"], tmp_path))
