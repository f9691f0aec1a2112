"""Graphs whose weights become integers, run by ONNX Runtime and held against numpy.

N rows of a weight, K columns, b columns of a block, M rows of activations
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch

from planforge.exporter.number_formats import CPU_SIZES
from planforge.exporter.passes import tables
from planforge.exporter.passes.quantize import find_quantizable
from planforge.exporter.passes.storage import read_weights
from planforge.exporter.passes.tables import PARTS, SPLIT_FROM_ROWS, split_shared_table
from planforge.exporter.passes.weights import attach_parameters, save_with_shared_weights

from ...helpers.blocks import RANGE, Array, by_block, dequantized, quantize_weights
from ...helpers.graphs import nodes, normal, parse_graph, run_graph

Weights: TypeAlias = dict[str, torch.Tensor]

BITS = pytest.mark.parametrize("bits", [8, 4])
SIZES = pytest.mark.parametrize("size", CPU_SIZES)

# Ways in which a graph multiplies by a weight (48, 256) of a table: y = x @ weight.T + bias.
TURN = "turned = Transpose <perm = [1, 0]> (weight)\n"
FORMS = {
    "MatMul by a weight stored transposed": f"{TURN} y = MatMul (x, turned)",
    "MatMul by a Transpose": f"{TURN} y = MatMul (x, turned)\n z = Abs (weight)",
    "MatMul and a sum": f"{TURN} product = MatMul (x, turned)\n y = Add (product, bias)",
    "a sum with a MatMul": f"{TURN} product = MatMul (x, turned)\n y = Add (bias, product)",
    "Gemm by rows": "y = Gemm <transB = 1> (x, weight)",
    "Gemm by rows and bias": "y = Gemm <transB = 1> (x, weight, bias)",
    "Gemm by columns and bias": f"{TURN} y = Gemm (x, turned, bias)",
}
K = 256


def graph(body: str, parameters: Weights, *, x: str = "n, 256", y: str = "n, 48", more: str = "") -> ir.Model:
    """A graph of x, and of ids (a, b) if it reads them, with weights attached as an export does it."""
    given = "".join(f", float[{', '.join(map(str, t.shape))}] {name}" for name, t in parameters.items())
    text = f"""
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
g (float[{x}] x{", int64[a, b] ids" if "ids" in body else ""}{given}) => (float[{y}] y{more})
{{
    {body}
}}
"""
    model = parse_graph(text)
    attach_parameters(model, parameters)
    return model


def parameters(rows: int = 48, width: int = K) -> Weights:
    return {
        "weight": torch.from_numpy(normal(rows, width, seed=1)),
        "bias": torch.from_numpy(normal(rows, seed=2)),
    }


def constant(value: ir.Value | None) -> npt.NDArray[Any]:
    assert value is not None and value.const_value is not None
    return value.const_value.numpy()


def weight_of(product: ir.Node) -> Array:
    """(N, K) that a MatMulNBits multiplies by, after its documentation."""
    bits = product.attributes.get_int("bits")
    assert bits is not None
    found = dequantized(constant(product.inputs[1]), constant(product.inputs[2]), bits)
    assert found.shape == (product.attributes.get_int("N"), product.attributes.get_int("K"))
    return found


def assert_product(got: Array, x: Array, weight: Array, size: int, bias: Array | float = 0.0) -> None:
    """y = x @ weight.T + bias, if "input A can be quantized with the same block_size to int8 internally"."""
    exact = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    step = np.abs(by_block(x, size)).max(-1) / 127  # (M, K / b)
    blocks = by_block(weight, size)
    sums = 1e-5 * (np.abs(x) @ np.abs(weight).T + np.abs(bias))  # of fp32 in some order
    off = np.abs(got - exact)
    assert (off <= step / 2 @ np.abs(blocks).sum(-1).T + sums).all()
    # Rounding is off by step / sqrt(12) on average: half a step everywhere would hide a wrong scale.
    expected = np.square(step) / 12 @ np.square(blocks).sum(-1).T
    assert np.square(off).mean() <= 1.5 * expected.mean() + np.square(sums).mean()


@SIZES
@BITS
@pytest.mark.parametrize("form", FORMS)
def test_a_product_by_a_quantized_weight(form: str, bits: int, size: int) -> None:
    given = parameters()
    body = FORMS[form]
    more = ", float[48, 256] z" if "z = " in FORMS[form] else ""
    if "bias" not in body:
        del given["bias"]
    model = graph(body, given, more=more)
    quantize_weights(model, bits, size)
    (product,) = nodes(model, "MatMulNBits")
    assert not any(nodes(model, operator) for operator in ("MatMul", "Gemm", "Add"))
    attributes = {name: product.attributes.get_int(name) for name in ("bits", "block_size", "accuracy_level")}
    assert attributes == {"bits": bits, "block_size": size, "accuracy_level": 4}
    weight = weight_of(product)
    step = np.abs(by_block(given["weight"].numpy(), size)).max(-1) / RANGE[bits][1]
    off = np.abs(by_block(weight - given["weight"].numpy(), size)).max(-1)
    assert (off <= step * (0.51 if bits == 8 else 2.5)).all()  # int4 may clip a quarter of 7 steps
    x = normal(5, K, seed=3) * np.exp(normal(5, K, seed=4))
    bias = given["bias"].numpy() if "bias" in given else 0.0
    assert_product(run_graph(model, x=x)[0], x, weight, size, bias)


@BITS
@pytest.mark.parametrize(
    ("gelu", "approximate", "left"), [("FastGelu", "tanh", "FastGelu"), ("BiasGelu", "none", "Gelu")]
)
def test_a_product_adds_the_bias_of_a_gelu(gelu: str, approximate: str, left: str, bits: int) -> None:
    given = parameters()
    body = f"{TURN} product = MatMul (x, turned)\n y = com.microsoft.{gelu} (product, bias)"
    model = graph(body, given)
    quantize_weights(model, bits, 64)
    (product,) = nodes(model, "MatMulNBits")
    (activation,) = nodes(model, left)
    assert len(activation.inputs) == 1 and not nodes(model, "Add")
    x = normal(5, K, seed=3)
    (got,) = run_graph(model, x=x)
    (sums,) = run_graph(cut_before(model, activation), x=x)
    want = torch.nn.functional.gelu(torch.from_numpy(sums), approximate=approximate).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert_product(sums, x, weight_of(product), 64, given["bias"].numpy())


def cut_before(model: ir.Model, node: ir.Node) -> ir.Model:
    """Return a graph that gives what a node reads, in the place of its own result."""
    (read,) = node.inputs
    assert read is not None
    read.name = "sums"
    read.shape = node.outputs[0].shape
    model.graph.outputs[0] = read
    model.graph.remove(node, safe=True)
    return model


def test_activations_may_have_more_axes() -> None:
    model = graph(FORMS["MatMul by a weight stored transposed"], parameters(), x="p, q, 256", y="p, q, 48")
    quantize_weights(model, 8, 64)
    x = normal(2, 3, K)
    got = run_graph(model, x=x)[0]
    assert got.shape == (2, 3, 48)
    weight = weight_of(nodes(model, "MatMulNBits")[0])
    assert_product(got.reshape(6, 48), x.reshape(6, K), weight, 64)


TIED = f"{TURN} embedded = Gather (weight, ids)\n y = MatMul (x, turned)"


@BITS
def test_a_table_of_words_and_head_is_rounded_once(bits: int) -> None:
    given = {"weight": parameters()["weight"]}
    model = graph(TIED, given, more=", float[a, b, 256] embedded")
    quantize_weights(model, bits, 64)
    (product,), (lookup,) = nodes(model, "MatMulNBits"), nodes(model, "GatherBlockQuantized")
    weight = weight_of(product)
    table = dequantized(constant(lookup.inputs[0]), constant(lookup.inputs[2]), bits)
    np.testing.assert_array_equal(table, weight)
    x = normal(2, K)
    ids = np.array([[0, 47, 3], [3, 11, 0]])
    y, embedded = run_graph(model, x=x, ids=ids)
    np.testing.assert_array_equal(embedded, weight[ids])  # a row is read, not computed with
    assert_product(y, x, weight, 64)
    read = read_weights(model.graph)
    assert {one.node for one in read} == {product, lookup}
    for one in read:
        assert (one.names, one.format.bits, one.shape) == (("weight",), bits, weight.shape)
        assert one.is_table and not one.faults
        np.testing.assert_array_equal(one.read(slice(5, 9)).dequantize(), weight[5:9])


@pytest.mark.parametrize(
    ("width", "zeros", "wrong"),
    [
        (64, 0x88, False),  # two blocks share a byte
        (64, 0x08, True),
        (64, 0x87, True),
        (96, 0x08, False),  # the fourth half is no block's
    ],
)
def test_zero_points_are_read_in_pairs(width: int, zeros: int, wrong: bool) -> None:
    """The last byte of a row with an odd number of blocks is half empty."""
    model = graph(FORMS["Gemm by rows and bias"], parameters(width=width), x=f"n, {width}")
    quantize_weights(model, 4, 32)
    (product,) = nodes(model, "MatMulNBits")
    rows = np.full((48, -(-width // 64)), 0x88, np.uint8)
    rows[7, -1] = zeros
    value = ir.Value(name="zeros", const_value=ir.tensor(rows.reshape(-1)))
    product.replace_input_with(3, value)
    (read,) = read_weights(model.graph)
    assert read.faults == (
        ("has zero points 'zeros' that are not the middle of its values",) if wrong else ()
    )


def test_a_lookup_alone_is_exact_too() -> None:
    given = {"words": torch.from_numpy(normal(7, 64))}
    model = graph("y = Gather (words, ids)", given, y="a, b, 64")
    quantize_weights(model, 8, 32)
    (lookup,) = nodes(model, "GatherBlockQuantized")
    table = dequantized(constant(lookup.inputs[0]), constant(lookup.inputs[2]), 8)
    np.testing.assert_allclose(table, given["words"], atol=np.abs(given["words"].numpy()).max() / 254 * 1.01)
    np.testing.assert_array_equal(
        run_graph(model, x=normal(1, 256), ids=np.array([[6, 0]]))[0], table[[[6, 0]]]
    )


@pytest.mark.parametrize(("rows", "rounded"), [(31, False), (32, True)])
def test_a_narrow_head_stays_as_it_is(rows: int, rounded: bool) -> None:
    given = parameters(rows)
    model = graph(FORMS["Gemm by rows and bias"], given, y=f"n, {rows}")
    quantize_weights(model, 4, 32)
    assert bool(nodes(model, "MatMulNBits")) == rounded
    if not rounded:
        x = normal(3, K)
        want = x @ given["weight"].numpy().T + given["bias"].numpy()
        np.testing.assert_allclose(run_graph(model, x=x)[0], want, rtol=1e-5, atol=1e-5)


ACROSS = "across = Transpose <perm = [1, 0]> (x)\n"
OTHERS = {
    "alpha": "y = Gemm <transB = 1, alpha = 0.5> (x, weight, bias)",
    "beta": "y = Gemm <transB = 1, beta = 2.0> (x, weight, bias)",
    "transA": f"{ACROSS} y = Gemm <transA = 1, transB = 1> (across, weight, bias)",
    "two sums": "inner = Gemm <transB = 1> (x, weight, bias)\n y = Add (inner, bias)",
    "the product is a result too": f"{TURN} z = MatMul (x, turned)\n y = Add (z, bias)",
    "the product is read twice": f"{TURN} a = MatMul (x, turned)\n b = Add (a, bias)\n y = Mul (a, b)",
    "the sum with another product": f"{TURN} a = MatMul (x, turned)\n b = Abs (a)\n y = Add (a, b)",
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("form", OTHERS)
def test_other_sums_are_still_computed(form: str, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SPLIT_FROM_ROWS", 40)
    given = parameters()
    x = normal(4, K)
    model = graph(OTHERS[form], given, more=", float[n, 48] z" if " z = " in OTHERS[form] else "")
    want = run_graph(model, x=x)
    if split:
        split_shared_table(model)
    else:
        quantize_weights(model, 8, 32)
    for got, exact in zip(run_graph(model, x=x), want, strict=True):
        # Both sides are rounded to 127 steps: a hundredth of the results' size.
        np.testing.assert_allclose(got, exact, atol=1e-3 if split else 0.03 * np.abs(exact).max())


def test_a_sum_with_a_single_number_is_still_computed() -> None:
    given = {**parameters(), "bias": torch.tensor([0.5])}
    model = graph(FORMS["MatMul and a sum"], given)
    x = normal(4, K)
    want = run_graph(model, x=x)[0]
    quantize_weights(model, 8, 32)
    np.testing.assert_allclose(run_graph(model, x=x)[0], want, atol=0.5)


def test_the_weight_of_a_width_that_no_block_divides_is_named() -> None:
    model = graph(FORMS["Gemm by rows and bias"], parameters(width=96), x="n, 96")
    ((_, weight),) = find_quantizable(model.graph)
    assert (weight.name, weight.array().shape) == ("weight", (48, 96))
    with pytest.raises(ValueError, match=r"weight: a width of 96 is not a multiple of the block of 64"):
        quantize_weights(model, 8, 64)


ROWS = SPLIT_FROM_ROWS + 5  # not a multiple of the number of parts


def large(bias: bool) -> tuple[ir.Model, Weights]:
    """A head of many rows, whose table is read for words too."""
    given = parameters(ROWS, 32)
    if bias:
        body = "embedded = Gather (weight, ids)\n y = Gemm <transB = 1> (x, weight, bias)"
    else:
        body = TIED
        del given["bias"]
    return graph(body, given, x="n, 32", y=f"n, {ROWS}", more=", float[a, b, 32] embedded"), given


@pytest.mark.parametrize("bias", [False, True])
def test_a_large_table_is_opened_in_parts_and_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    x = normal(3, 32)
    ids = np.array([[ROWS - 1, 0]])
    results = {}
    for parts in (1, PARTS):
        monkeypatch.setattr(tables, "SPLIT_FROM_ROWS", 10**9 if parts == 1 else SPLIT_FROM_ROWS)
        model, given = large(bias)
        split_shared_table(model)
        if bias or parts > 1:
            assert len(nodes(model, "Gemm")) == parts
        (tmp_path / str(parts)).mkdir()
        save_with_shared_weights({"m.onnx": model}, tmp_path / str(parts), "m.data")
        results[parts] = run_graph(tmp_path / str(parts) / "m.onnx", x=x, ids=ids)
        table = ROWS * 32 * 4
        size = (tmp_path / str(parts) / "m.data").stat().st_size
        assert table + ROWS * 4 * bias <= size < table + ROWS * 4 * bias + 3 * 65536  # aligned to pages
    for one, split in zip(results[1], results[PARTS], strict=True):
        np.testing.assert_allclose(split, one, rtol=1e-5, atol=1e-4)
    weight = given["weight"].numpy()
    own = given["bias"].numpy() if bias else 0.0
    np.testing.assert_allclose(results[PARTS][0], x @ weight.T + own, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_large_table_is_one_product_and_stored_once(tmp_path: Path, bits: int, bias: bool) -> None:
    x = normal(3, 32)
    model, given = large(bias)
    quantize_weights(model, bits, 32)
    assert len(nodes(model, "MatMulNBits")) == 1
    save_with_shared_weights({"m.onnx": model}, tmp_path, "m.data")
    # int8: a byte a number and a float a block of 32; the bias are floats
    table = ROWS * 32 * bits // 8 + ROWS * 4
    size = (tmp_path / "m.data").stat().st_size
    assert table + ROWS * 4 * bias <= size < table + ROWS * 4 * bias + 3 * 65536  # aligned to pages
    weight = given["weight"].numpy()
    own = given["bias"].numpy() if bias else 0.0
    logits = run_graph(tmp_path / "m.onnx", x=x, ids=np.array([[ROWS - 1, 0]]))[0]
    # Against the weights themselves: int4 is off by about 0.1 a number, of which there are 32 in a row.
    np.testing.assert_allclose(logits, x @ weight.T + own, atol={8: 0.5, 4: 4.0}[bits])


def test_the_head_and_the_words_are_the_same_bytes_of_the_weights_file(tmp_path: Path) -> None:
    model, _ = large(False)
    quantize_weights(model, 4, 32)
    save_with_shared_weights({"m.onnx": model}, tmp_path, "m.data")
    saved = ir.load(tmp_path / "m.onnx")
    (lookup,) = nodes(saved, "GatherBlockQuantized")
    (product,) = nodes(saved, "MatMulNBits")
    for index, source in ((1, 0), (2, 2)):  # the numbers and their scales
        places = []
        for value in (lookup.inputs[source], product.inputs[index]):
            assert value is not None and isinstance(value.const_value, ir.ExternalTensor)
            places.append((value.const_value.offset, value.const_value.length))
        assert places[0] == places[1]


def test_two_graphs_keep_a_shared_table_once(tmp_path: Path) -> None:
    head, _ = large(False)
    words = graph("y = Gather (weight, ids)", {"weight": parameters(ROWS, 32)["weight"]}, y="a, b, 32")
    for model in (head, words):
        quantize_weights(model, 8, 32)
    save_with_shared_weights({"head.onnx": head, "words.onnx": words}, tmp_path, "m.data")
    table = ROWS * 32 + ROWS * 4
    assert table <= (tmp_path / "m.data").stat().st_size < table + 2 * 65536
    ids = np.array([[5, ROWS - 1]])
    embedded = run_graph(tmp_path / "head.onnx", x=normal(1, 32), ids=ids)[1]
    np.testing.assert_array_equal(run_graph(tmp_path / "words.onnx", x=normal(1, 256), ids=ids)[0], embedded)
