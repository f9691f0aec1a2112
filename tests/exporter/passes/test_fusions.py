"""Operators that ONNX Runtime has in one: fused where they compute the same, left alone elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from planforge.exporter.passes.fusions import fuse_for_onnx_runtime

from ...helpers.graphs import nodes, normal, parse_graph, run_graph


def graph(body: str, inputs: str, outputs: str) -> ir.Model:
    text = f"""
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
g ({inputs}) => ({outputs})
{{
    {body}
}}
"""
    return parse_graph(text)


def assert_fused(model: ir.Model, operators: Sequence[str], **inputs: npt.NDArray[Any]) -> None:
    """Fusing gives these operators, and the numbers of before."""
    before = run_graph(model, **inputs)
    fuse_for_onnx_runtime(model)
    assert [node.op_type for node in model.graph if node.op_type != "Constant"] == operators
    for got, want in zip(run_graph(model, **inputs), before, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_gelu_takes_its_bias_in() -> None:
    inputs = "float[a, b, 8] x, float[8] bias"
    for form, fused in (("tanh", "FastGelu"), ("none", "BiasGelu")):
        for order in ("x, bias", "bias, x"):
            body = f'sum = Add ({order})\n y = Gelu <approximate = "{form}"> (sum)'
            model = graph(body, inputs, "float[a, b, 8] y")
            assert_fused(model, [fused], x=3 * normal(2, 3, 8), bias=normal(8, seed=1))


def test_gelu_of_two_tensors_stays_a_sum() -> None:
    body = 'sum = Add (x, y)\n z = Gelu <approximate = "tanh"> (sum)'
    model = graph(body, "float[a, 8] x, float[a, 8] y", "float[a, 8] z")
    assert_fused(model, ["Add", "Gelu"], x=normal(3, 8), y=normal(3, 8, seed=1))


def test_residuals_and_norms_stay_apart() -> None:
    """ONNX Runtime has both in one, which takes longer."""
    norm = "LayerNormalization <axis = -1, epsilon = 0.001, stash_type = 1>"
    body = f"sum = Add (x, y)\n z = {norm} (sum, scale, shift)\n w = Add (sum, z)"
    inputs = "float[a, b, 8] x, float[a, b, 8] y, float[8] scale, float[8] shift"
    model = graph(body, inputs, "float[a, b, 8] w")
    given = {"x": normal(1, 3, 8), "y": normal(1, 3, 8, seed=1), "scale": normal(8, seed=2)}
    assert_fused(model, ["Add", "LayerNormalization", "Add"], **given, shift=normal(8, seed=3))


RESHAPES = "<int64[4] apart = {0, 0, 2, 4}, int64[3] joined = {0, 0, 8}, int64[3] other = {0, -1, 4}>"


@pytest.mark.parametrize(("back", "width", "left"), [("joined", 8, ["Neg"]), ("other", 4, ["Reshape"] * 2)])
def test_reshapes_there_and_back_go_others_stay(back: str, width: int, left: list[str]) -> None:
    text = f"""
<ir_version: 10, opset_import: ["" : 20]>
g (float[a, b, 8] x) => (float[a, {"b" if width == 8 else "c"}, {width}] y)
{RESHAPES}
{{
    middle = Reshape (x, apart)
    again = Reshape (middle, {back})
    y = Neg (again)
}}
"""
    model = parse_graph(text)
    assert_fused(model, [*left, "Neg"] if left[0] == "Reshape" else left, x=normal(2, 3, 8))


ATTENTION = """{names} = Split <axis = 2, num_outputs = 3> (joined)
    y, present_key, present_value = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2>
        ({order}, key, value, last, total)"""


@pytest.mark.parametrize(
    ("order", "extra", "packed"), [("q, k, v", "", True), ("k, q, v", "", False), ("q, k, v", "z", True)]
)
def test_queries_keys_and_values_are_packed_in_their_order_only(order: str, extra: str, packed: bool) -> None:
    body = ATTENTION.format(names="q, k, v", order=order) + ("\n z = Neg (k)" if extra else "")
    cache = "float[a, 2, s, 8]"
    inputs = f"float[a, b, 48] joined, {cache} key, {cache} value, int32[a] last, int32 total"
    outputs = f"float[a, b, 16] y, {cache} present_key, {cache} present_value"
    model = graph(body, inputs, outputs + (", float[a, b, 16] z" if extra else ""))
    given = {"joined": normal(2, 3, 48), "key": np.zeros((2, 2, 5, 8), np.float32)}
    given |= {"value": given["key"], "last": np.array([2, 2], np.int32), "total": np.array(3, np.int32)}
    attention = ["GroupQueryAttention"]
    left = attention if packed and not extra else ["Split", *attention, *(["Neg"] if extra else [])]
    assert_fused(model, left, **given)
    (node,) = nodes(model, "GroupQueryAttention")
    assert [value is None for value in node.inputs[:3]] == [False, packed, packed]


CHOSEN = """hidden = Tanh (x)
 width = Constant <value = int64[2] {-1, 8}> ()
 flat = Reshape (hidden, width)
 last = Constant <value = int64[1] {-1}> ()
 index = Unsqueeze (logit_rows, last)
 picked = GatherND (flat, index)
 logits = Neg (picked)"""


def test_rows_are_chosen_early_but_never_of_an_output() -> None:
    """A graph that also gives the states that rows are chosen of gives all of their rows."""
    inputs = "float[a, b, 8] x, int64[n] logit_rows"
    given = {"x": normal(2, 3, 8), "logit_rows": np.array([4, 0])}
    alone = graph(CHOSEN, inputs, "float[n, 8] logits")
    assert_fused(alone, ["Reshape", "Gather", "Tanh", "Neg"], **given)
    beside = graph(CHOSEN, inputs, "float[a, b, 8] hidden, float[n, 8] logits")
    assert_fused(beside, ["Tanh", "Reshape", "Unsqueeze", "GatherND", "Neg"], **given)
    hidden = beside.graph.outputs[0].shape
    assert hidden is not None and [getattr(axis, "value", axis) for axis in hidden] == ["a", "b", 8]
