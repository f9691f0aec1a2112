"""int8 and int4 weights of graphs in fp16 in ONNX Runtime's operator: the same values as in plans' graphs.

What the codes stand for onnx's own evaluator says, of the same weights behind DequantizeLinear.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from planforge.exporter.passes import store_blocks, store_dequantized
from planforge.exporter.passes.fp16 import convert_to_fp16
from planforge.exporter.passes.fp16_ranges import Fp32Reason
from planforge.exporter.passes.quantize import QuantizedWeights
from planforge.exporter.passes.storage import Form, read_weights
from planforge.exporter.precisions import PRECISIONS
from planforge.exporter.verification.quantized_weights import check_quantized_weights
from planforge.runtime.backends.ort_program import open_plain_session

from ...helpers.graphs import nodes, parse_graph

Array = npt.NDArray[np.float32]
N = 48
PARTS = pytest.mark.parametrize(
    ("precision", "width", "size"),
    [("w8a16", 384, 0), ("w8a16", 80, 0), ("w4a16", 384, 128), ("w4a16", 96, 32)],
)
HALF_DIGITS = 2.0**-11


def draw(*shape: int) -> Array:
    return np.random.default_rng(4).standard_normal(shape).astype(np.float32)


def make(
    form: Form, precision: str, width: int, size: int, choices: dict[str, Fp32Reason] | None = None
) -> tuple[ir.Model, Array]:
    """A graph in fp16: a product of a weight (N, width) in codes, with a bias; and the weight."""
    weight = draw(N, width) * np.geomspace(1e-2, 1, N, dtype=np.float32)[:, None]
    shapes = (
        f"float[{width},{N}] w = {{{','.join(['0'] * (N * width))}}}, float[{N}] b = {{{'0.5,' * (N - 1)}0}}"
    )
    body = f"(float[t,{width}] x) => (float[t,{N}] y) <{shapes}> {{ p = MatMul(x, w) y = Add(p, b) }}"
    model = parse_graph(f'<ir_version: 10, opset_import: ["" : 21]> g {body}')
    model.graph.initializers["w"].const_value = ir.tensor(np.ascontiguousarray(weight.T), name="w")
    kind = PRECISIONS[precision]
    bits = kind.weight_bits
    assert bits is not None
    form.store(model, QuantizedWeights(bits, size, {"w": bits}, {"w": lambda: weight}, formats=kind.formats))
    convert_to_fp16(model, [], choices)
    return model, weight


@PARTS
def test_the_product_is_that_of_the_values_that_plans_have(precision: str, width: int, size: int) -> None:
    model, _ = make(store_blocks, precision, width, size)
    in_plan, _ = make(store_dequantized, precision, width, size)
    x = draw(5, width).astype(np.float16)
    (found,) = open_plain_session(ir.to_proto(model).SerializeToString()).run(None, {"x": x})
    values = next(weight.read(slice(None)).dequantize() for weight in read_weights(in_plan.graph))
    (expected,) = ReferenceEvaluator(ir.to_proto(in_plan)).run(None, {"x": x})
    # Each of the products and sums rounds to fp16 once at most, as does a dequantized weight.
    room = 4 * HALF_DIGITS * (np.abs(x).astype(np.float32) @ np.abs(values.T) + 1)
    assert (np.abs(found.astype(np.float32) - np.asarray(expected, np.float32)) <= room).all()
    (node,) = nodes(model, "MatMulNBits")
    assert node.inputs[2] is not None and node.inputs[2].dtype == ir.DataType.FLOAT16
    assert node.name == "node_0" and len(nodes(model, "Add")) == 1  # as calibration knows both


@PARTS
def test_what_is_stored_is_read_back(precision: str, width: int, size: int) -> None:
    model, weight = make(store_blocks, precision, width, size)
    (stored,) = read_weights(model.graph)
    (in_plan,) = read_weights(make(store_dequantized, precision, width, size)[0].graph)
    assert (stored.names, stored.format, stored.shape, stored.faults) == (
        *(in_plan.names, in_plan.format, (N, width)),
        (),
    )
    for rows in (slice(None), slice(3, 7)):
        np.testing.assert_array_equal(stored.read(rows).codes, in_plan.read(rows).codes)
        np.testing.assert_array_equal(stored.read(rows).scale, in_plan.read(rows).scale)
    assert list(check_quantized_weights([stored], {"w": weight}, lambda name: None, True)) == [""]


def test_a_product_in_fp32_keeps_its_codes() -> None:
    """Its results are beyond fp16, and so may its weight be; codes are not scaled."""
    choices = {"node_0": Fp32Reason(reached=1e6, shift=3), "node_1": Fp32Reason(reached=1e6)}
    model, weight = make(store_blocks, "w8a16", 96, 0, choices)
    (node,) = nodes(model, "MatMulNBits")
    assert node.outputs[0].dtype == ir.DataType.FLOAT and not nodes(model, "Mul")
    (stored,) = read_weights(model.graph)
    assert stored.format == PRECISIONS["w8a16"].formats[8] and not stored.faults
    assert list(check_quantized_weights([stored], {"w": weight}, lambda name: None, True)) == [""]


def damage_scale(node: ir.Node) -> None:
    value = node.inputs[2]
    assert value is not None and value.const_value is not None
    scale = np.array(value.const_value.numpy())
    scale.reshape(N, -1)[7, 1] *= 1.25
    value.const_value = ir.tensor(scale, name=value.name)


def damage_code(node: ir.Node) -> None:
    value = node.inputs[1]
    assert value is not None and value.const_value is not None
    codes = np.array(value.const_value.numpy())
    codes.reshape(N, -1)[7, 1] ^= 0x18
    value.const_value = ir.tensor(codes, name=value.name)


def round_rows(node: ir.Node) -> None:
    node.attributes.add(ir.AttrInt64("accuracy_level", 1))


@pytest.mark.parametrize(
    ("precision", "damage", "words"),
    [
        ("w8a16", damage_scale, "has more than one scale in row 7"),
        ("w4a16", damage_scale, "block 1 of row 7 has"),
        ("w8a16", damage_code, "1 of 18432 values are more than half a step off"),
        ("w4a16", damage_code, "2 of 18432 values are more than half a step off"),  # two codes in a byte
        ("w8a16", round_rows, "has accuracy_level 1, and multiplies in fp16"),
    ],
)
def test_what_is_changed_is_told(precision: str, damage: Callable[[ir.Node], None], words: str) -> None:
    size = 128 if precision == "w4a16" else 0
    model, weight = make(store_blocks, precision, 384, size)
    damage(nodes(model, "MatMulNBits")[0])
    (stored,) = read_weights(model.graph)
    found = [*stored.faults, *check_quantized_weights([stored], {"w": weight}, lambda name: None, True)]
    assert any(words in fault for fault in found), found


def test_a_width_that_no_block_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="w: a width of 40 is not a multiple of 16; export fp16"):
        make(store_blocks, "w8a16", 40, 0)
