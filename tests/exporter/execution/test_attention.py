"""Attention in parts: each is what numpy computes in float64 and rounds where the graph rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from planforge.exporter.execution.attention import MASKED_SCORES, RESULT, SCORES, WEIGHTS, AttentionParts
from planforge.exporter.execution.node_executor import NodeExecutor, NotFiniteError, is_finite

Array = npt.NDArray[Any]
B, H, K, T, S, D = 2, 6, 2, 5, 9, 8
SCALE = 0.3


def make_inputs(dtype: str, heads: int = H, size: float = 1.0) -> list[Array]:
    generator = np.random.default_rng(0)
    q = generator.normal(size=(B, H, T, D)) * size
    k = generator.normal(size=(B, heads, S, D)) * size
    v = generator.normal(size=(B, heads, S, D))
    mask = np.where(np.arange(S) <= np.arange(T)[:, None] + 2, 0.0, -30000.0)[None, None]
    return [array.astype(dtype) for array in (q, k, v, mask)]


def make_node(dtype: str) -> ir.Model:
    """Return a graph of one Attention with a mask and a scale."""
    kind = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
    inputs = [ir.Value(name=name, type=kind, shape=ir.Shape([None] * 4)) for name in ("q", "k", "v", "mask")]
    node = ir.node("Attention", inputs, {"scale": SCALE}, name="attention")
    node.outputs[0].name = "y"
    node.outputs[0].type = kind
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 24}, name="graph")
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(("dtype", "apart"), [("float16", 2e-3), ("float32", 1e-6)])
def test_every_part_is_what_numpy_computes(dtype: str, apart: float) -> None:
    arrays = make_inputs(dtype)
    parts = AttentionParts([array.dtype for array in arrays], SCALE).compute(*arrays)
    q, k, v, mask = (array.astype(np.float64) for array in arrays)

    def round_result(array: Array) -> Array:
        return array.astype(dtype).astype(np.float64)

    scores = round_result(q @ k.swapaxes(-1, -2) * SCALE)
    masked = round_result(scores + mask)
    powers = np.exp(masked - masked.max(-1, keepdims=True))
    weights = round_result(powers / powers.sum(-1, keepdims=True))
    want = {SCORES: scores, MASKED_SCORES: masked, WEIGHTS: weights, RESULT: weights @ v}
    assert list(parts) == list(want)
    for name, array in want.items():
        assert parts[name].dtype == dtype, name
        np.testing.assert_allclose(parts[name], array, rtol=apart, atol=apart, err_msg=name)


def test_fp16_keeps_the_bits_that_fp16_has() -> None:
    """In fp32 the same weights are not numbers of fp16: a session that leaves out the casts is seen."""
    arrays = make_inputs("float16")
    rounded = AttentionParts([array.dtype for array in arrays], SCALE).compute(*arrays)
    exact = [array.astype(np.float32) for array in arrays]
    full = AttentionParts([array.dtype for array in exact], SCALE).compute(*exact)
    again = full[WEIGHTS].astype(np.float16).astype(np.float32)
    assert (again != full[WEIGHTS]).mean() > 0.3
    assert (rounded[MASKED_SCORES].astype(np.float32) != full[MASKED_SCORES]).mean() > 0.3


def test_heads_that_share_keys_and_values_are_those_with_copies() -> None:
    q, k, v, mask = make_inputs("float32", heads=K)
    executor = NodeExecutor(make_node("float32"))
    shared = executor.run({"q": q, "k": k, "v": v, "mask": mask})["y"]
    copies = [np.concatenate([x[:, i // (H // K)][:, None] for i in range(H)], axis=1) for x in (k, v)]
    assert copies[0].shape == q.shape[:2] + k.shape[2:]
    single = executor.run({"q": q, "k": copies[0], "v": copies[1], "mask": mask})["y"]
    np.testing.assert_array_equal(shared, single)


def test_scores_that_leave_fp16_are_named() -> None:
    q, k, v, mask = make_inputs("float16", size=400.0)
    with pytest.raises(NotFiniteError, match=r"result 'y, scores' \(Attention, float16\) gives inf"):
        NodeExecutor(make_node("float16")).run({"q": q, "k": k, "v": v, "mask": mask})


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_finite_numbers_are_told_from_others(dtype: str) -> None:
    largest = np.finfo(dtype).max
    array = np.array([[0.0, -largest, largest], [1.0, -0.0, np.finfo(dtype).smallest_subnormal]], dtype)
    assert is_finite(array)
    assert is_finite(array[:0])
    for bad in (np.nan, np.inf, -np.inf):
        array[1, 1] = bad
        assert not is_finite(array)
        assert not is_finite(array.T)
