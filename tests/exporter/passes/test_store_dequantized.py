"""Quantized weights behind DequantizeLinear: onnx's own evaluator says what the codes stand for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from planforge.exporter.execution.node_executor import NodeExecutor
from planforge.exporter.number_formats import PLAN_FLOATS, PLAN_INTEGERS
from planforge.exporter.passes.fp16 import convert_to_fp16
from planforge.exporter.passes.fp16_ranges import Fp32Reason
from planforge.exporter.passes.quantize import QuantizedWeights
from planforge.exporter.passes.storage import read_weights
from planforge.exporter.passes.store_dequantized import OPERATOR, store
from planforge.exporter.precisions import PRECISIONS

from ...helpers.graphs import nodes, parse_graph

Array = npt.NDArray[np.float32]
K, N = 64, 8
MATMUL = f"(float[t,{K}] x) => (float[t,{N}] y) {{ y = MatMul(x, w) }}"
GEMM = f"(float[t,{K}] x, float[{N}] b) => (float[t,{N}] y) {{ y = Gemm<transB=1>(x, w, b) }}"
PARTS = [("w8a16", 8, 0), ("w4a16", 4, 32), ("w4a16", 4, 64), ("fp8a16", 8, 0), ("nvfp4a16", 4, 16)]
PARTS_OF = pytest.mark.parametrize(("precision", "bits", "size"), PARTS)
# How far a value may be off, in units of its scale, where rounding clips none: half of the widest gap of the
# codes, by the definition of each type.
FURTHEST = {"w8a16": 0.5, "w4a16": 0.5, "fp8a16": 16.0, "nvfp4a16": 1.0}


def draw(*shape: int) -> Array:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def make(
    precision: str, bits: int, size: int, by_rows: bool, choices: dict[str, Fp32Reason] | None = None
) -> tuple[ir.Model, QuantizedWeights]:
    """A product of a weight (N, K) in fp16, stored in `bits`."""
    formats = PRECISIONS[precision].formats
    weight = draw(N, K) * np.geomspace(1e-3, 1, N, dtype=np.float32)[:, None]
    stored = weight if by_rows else np.ascontiguousarray(weight.T)
    shape = f"float[{N},{K}]" if by_rows else f"float[{K},{N}]"
    body = (GEMM if by_rows else MATMUL).replace(
        " {", f" <{shape} w = {{{','.join(['0'] * (N * K))}}}> {{", 1
    )
    model = parse_graph(f'<ir_version: 10, opset_import: ["" : 20]> g {body}')
    model.graph.initializers["w"].const_value = ir.tensor(stored, name="w")
    chosen = QuantizedWeights(bits, size, {"w": bits}, {"w": lambda: weight}, formats=formats)
    store(model, chosen)
    convert_to_fp16(model, [], choices)
    return model, chosen


@pytest.fixture(autouse=True)
def take_narrow_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planforge.exporter.passes.quantize.MIN_ROWS", 1)


@pytest.mark.parametrize("by_rows", [False, True])
@PARTS_OF
def test_the_graph_holds_the_values_that_were_chosen(
    precision: str, bits: int, size: int, by_rows: bool
) -> None:
    model, chosen = make(precision, bits, size, by_rows)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    node = nodes(model, OPERATOR)[-1]
    alone = onnx.helper.make_model(
        onnx.helper.make_graph(
            [node for node in proto.graph.node if node.op_type == OPERATOR],
            "g",
            [],
            [onnx.helper.make_tensor_value_info(str(node.outputs[0].name), onnx.TensorProto.FLOAT16, [K, N])],
            list(proto.graph.initializer),
        ),
        opset_imports=list(proto.opset_import),
    )
    (found,) = ReferenceEvaluator(alone).run(None, {})
    expected = chosen["w"].dequantize()
    np.testing.assert_array_equal(found, expected.T.astype(np.float16))
    # As near as codes of so many bits are, of what was given; the scales are what fp16 holds, and positive.
    scale = chosen["w"].scale
    assert (scale > 0).all() and (scale.astype(np.float16).astype(np.float32) == scale).all()
    steps = np.repeat(scale, K // scale.shape[1], axis=1)
    off = np.abs(chosen.read["w"]() - expected) / steps
    clipped = np.abs(expected / steps) >= PRECISIONS[precision].formats[bits].top
    assert off[~clipped].max() <= 1.01 * FURTHEST[precision]
    assert clipped.mean() < 0.1
    assert scale.shape[1] == (1 if bits == 8 else K // size)


@PARTS_OF
def test_what_is_stored_is_read_back(precision: str, bits: int, size: int) -> None:
    model, chosen = make(precision, bits, size, by_rows=False)
    (stored,) = read_weights(model.graph)
    format = PRECISIONS[precision].formats[bits]
    assert (stored.names, stored.format, stored.shape, stored.faults) == (("w",), format, (N, K), ())
    assert not stored.is_table
    assert model.opset_imports[""] == {"w8a16": 20, "fp8a16": 20, "w4a16": 21, "nvfp4a16": 23}[precision]
    for rows in (slice(None), slice(2, 5)):
        np.testing.assert_array_equal(stored.read(rows).codes, chosen["w"].codes[rows])
        np.testing.assert_array_equal(stored.read(rows).scale, chosen["w"].scale[rows])


@PARTS_OF
def test_node_by_node_it_computes_what_onnx_says(precision: str, bits: int, size: int) -> None:
    model, _ = make(precision, bits, size, by_rows=False)
    seen: dict[str, npt.NDArray[np.generic]] = {}

    def keep(node: ir.Node, name: str, array: npt.NDArray[np.generic]) -> None:
        seen[node.op_type] = array

    x = draw(3, K).astype(np.float16)
    found = NodeExecutor(model, keep).run({"x": x})["y"]
    (expected,) = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})
    np.testing.assert_allclose(
        found.astype(np.float32), np.asarray(expected, np.float32), rtol=2e-3, atol=2e-3
    )
    assert seen[OPERATOR].dtype == np.float16


@pytest.mark.parametrize("shift", [None, 2])
def test_a_product_in_fp32_reads_its_weight_in_fp32(shift: int | None) -> None:
    """What it multiplies by may be beyond fp16 too; a weight of codes is not scaled."""
    choices = {"node_0": Fp32Reason(reached=1e6, shift=shift)}
    model, chosen = make("w8a16", 8, 0, by_rows=False, choices=choices)
    (node,) = nodes(model, OPERATOR)
    assert node.outputs[0].dtype == ir.DataType.FLOAT
    assert not [node for node in nodes(model, "Mul") if node.outputs]
    (stored,) = read_weights(model.graph)
    np.testing.assert_array_equal(stored.read(slice(None)).scale, chosen["w"].scale)
    assert not stored.faults


FAULTS: dict[str, Callable[[ir.Node], None]] = {
    "zero points": lambda node: node.resize_inputs(3),
    "axis 0": lambda node: node.attributes.add(ir.AttrInt64("axis", 0)),
    "block_size 16": lambda node: node.attributes.add(ir.AttrInt64("block_size", 16)),
}


@pytest.mark.parametrize("words", FAULTS)
def test_what_an_engine_would_take_otherwise_is_a_fault(words: str) -> None:
    model, _ = make("w8a16", 8, 0, by_rows=False)
    (node,) = nodes(model, OPERATOR)
    FAULTS[words](node)
    if words == "zero points":
        zeros = ir.tensor(np.ones(N, np.int8), name="zeros")
        model.graph.register_initializer(ir.Value(name="zeros", const_value=zeros))
        node.replace_input_with(2, model.graph.initializers["zeros"])
    (stored,) = read_weights(model.graph)
    assert len(stored.faults) == 1 and words in stored.faults[0]


def test_a_row_of_zeros_has_a_scale_that_is_none() -> None:
    weight = draw(N, K)
    weight[3] = 0
    for formats in (PLAN_INTEGERS, PLAN_FLOATS):
        for bits, format in formats.items():
            size = format.block_sizes[-1]
            found = QuantizedWeights(bits, size, {}, {}, formats=formats).quantize(weight, bits)
            assert (found.scale > 0).all() and not found.codes[3].astype(np.float32).any()
