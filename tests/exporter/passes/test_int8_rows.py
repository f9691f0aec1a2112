"""Encoders in int8: the graph against integers in numpy, the choices, and whole models against their fp32.

B batch, T tokens, K inputs, N outputs
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planforge.exporter import export
from planforge.exporter.checkpoints.source import DEMOS
from planforge.exporter.number_formats import INT8
from planforge.exporter.passes import store_rows
from planforge.exporter.passes.int8_rows import (
    RowProduct,
    RowRule,
    choose_product,
    find_attention_products,
    find_linears,
    round_product,
)
from planforge.exporter.passes.quantize import QuantizedWeights
from planforge.exporter.passes.quantized_weight import QuantizedWeight
from planforge.exporter.passes.storage import read_weights
from planforge.exporter.passes.weights import attach_parameters
from planforge.exporter.verification.artifacts import find_saturating
from planforge.runtime import TextEncoder, Translator
from planforge.runtime.backends.ort_program import open_plain_session
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.graphs import nodes, normal, parse_graph, run_graph

Array = npt.NDArray[np.float32]

K = 64
N = 24
ABSOLUTE = RowRule(128, 1e-6, True)
ONE_SIDED = RowRule(20, 0.5, False)
CONSTANT = RowRule(128, 1e-6, True, step=0.03)
CONSTANT_ONE_SIDED = RowRule(20, 1e-6, False, step=0.02)
SMOOTHING = np.exp(normal(K, seed=9) / 2)
SCALE = (np.abs(normal(N, seed=4)) / 100 + 0.001).astype(np.float32)
WEIGHT = QuantizedWeight(
    np.random.default_rng(3).integers(-127, 128, (N, K)).astype(np.int8), SCALE[:, None], INT8
)
JOINED = """
    q = MatMul (x, wq)
    k = MatMul (x, wk)
    qb = Add (q, bq)
    kb = Add (bk, k)
    y = Mul (qb, kb)
"""


def integers(x: Array, product: RowProduct) -> npt.NDArray[np.float64]:
    """The product as the module's documentation has it, in integers: (..., N)."""
    x64 = x.astype(np.float64)
    if product.smoothing is not None:
        x64 = x64 / product.smoothing
    rule = product.rule
    assert isinstance(rule, RowRule)
    largest = (np.abs(x64) if rule.absolute else x64).max(-1, keepdims=True)
    step = np.maximum(largest, rule.floor) / (127 if rule.absolute else 255 - rule.zero)
    if rule.step is not None:
        step = np.full_like(largest, np.float32(rule.step))
    q = np.clip(np.rint(x64 / step) + rule.zero, 0, 255).astype(np.int64)
    return np.asarray(
        step * ((q - rule.zero) @ product.weight.codes.T.astype(np.int64)) * product.weight.scale[:, 0]
    )


def quantize_encoder(model: ir.Model, products: dict[tuple[str, ...], RowProduct]) -> None:
    store_rows.store(model, QuantizedWeights(8, 32, {}, {}, products=products))


def graph(body: str, **parameters: Array) -> ir.Model:
    """A graph of x (B, T, K), with weights (rows, columns) that it multiplies by."""
    given = "".join(
        f", float[{', '.join(map(str, array.shape))}] {name}" for name, array in parameters.items()
    )
    model = parse_graph(
        f'<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
        f" g (float[b, t, {K}] x{given}) => (float[b, t, {N}] y) {{ {body} }}"
    )
    attach_parameters(model, {name: torch.from_numpy(array) for name, array in parameters.items()})
    return model


@pytest.mark.parametrize("rule", [ABSOLUTE, ONE_SIDED, RowRule(0, 1e-6, False), CONSTANT, CONSTANT_ONE_SIDED])
@pytest.mark.parametrize("smoothing", [None, SMOOTHING])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_that_of_integers(rule: RowRule, smoothing: Array | None, bias: bool) -> None:
    b = normal(N, seed=6)
    model = graph(
        "p = MatMul (x, w)\n y = Add (p, b)" if bias else "y = MatMul (x, w)",
        **{"w": normal(K, N, seed=5)} | ({"b": b} if bias else {}),
    )
    product = RowProduct(smoothing, rule, WEIGHT)
    (linears,) = find_linears(model.graph)
    quantize_encoder(model, {linears.names: product})
    assert not nodes(model, "MatMul") and len(nodes(model, "MatMulIntegerToFloat")) == 1
    assert len(nodes(model, "Add")) == (bias and rule.step is None)  # else the product adds the bias
    x = normal(3, 5, K, seed=7) * np.exp(normal(3, 5, 1, seed=8))
    x[0, 0] = 0  # a row of nothing has a step all the same
    (got,) = run_graph(model, x=x)
    want = integers(x, product) + (b if bias else 0)
    # A number at the border of two integers may fall to either side, one step of one input apart.
    rows = x / (1 if smoothing is None else smoothing)
    step = np.maximum(np.abs(rows).max(-1, keepdims=True), rule.floor) / 100
    step = step if rule.step is None else np.asarray(rule.step)
    assert np.abs(got - want).max() <= (step * 127 * SCALE).max()
    assert np.median(np.abs(got - want)) <= 1e-5 * np.abs(want).max()


def test_products_of_pairs_that_fit_need_no_exact_kernels() -> None:
    """On processors without VNNI, too: `make avx2` runs this as on one."""
    weight = normal(K, N, seed=5)
    weight[:, 0] = np.resize([0.5, 0.5, -0.5, -0.5], K)
    rule = RowRule(0, 1e-6, False, step=0.1)
    product = round_product(weight, None, rule)
    wide = RowProduct(None, rule, WEIGHT)
    x = np.full((1, 4, K), 25.5, np.float32)
    x[0, 1, ::4] = 0
    for each, fits in ((product, True), (wide, False)):
        model = graph("y = MatMul (x, w)", w=weight)
        (linears,) = find_linears(model.graph)
        quantize_encoder(model, {linears.names: each})
        faults = list(find_saturating(read_weights(model.graph, ["w"])))
        assert bool(faults) == (not fits)
        if fits:
            session = open_plain_session(ir.to_proto(model).SerializeToString())
            (got,) = session.run(None, {"x": x})
            np.testing.assert_allclose(got, integers(x, each), rtol=1e-6, atol=1e-5)
        else:
            assert "add up to" in faults[0]


def test_products_of_the_same_rows_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"wq": normal(K, N, seed=1), "wk": normal(K, N, seed=2)}
    biases = {"bq": normal(N, seed=3), "bk": normal(N, seed=4)}
    model = graph(JOINED, **arrays, **biases)
    x = normal(2, 7, K, seed=5)
    (exact,) = run_graph(model, x=x)
    (linears,) = find_linears(model.graph)
    product = choose_product(normal(400, K, seed=6), linears.join_weights())
    quantize_encoder(model, {linears.names: product})
    (node,) = nodes(model, "MatMulIntegerToFloat")
    assert len(nodes(model, "Split")) == 1
    (read,) = read_weights(model.graph, ["wq+wk"])
    assert (read.node, read.names, read.shape) == (node, ("wq", "wk"), (2 * N, K))
    np.testing.assert_array_equal(read.read(slice(None)).codes, product.weight.codes)
    np.testing.assert_array_equal(read.read(slice(3, 9)).scale, product.weight.scale[3:9])
    (got,) = run_graph(model, x=x)
    both = integers(x, product)
    want = (both[..., :N] + biases["bq"]) * (both[..., N:] + biases["bk"])
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()
    assert 1e-4 < np.abs(got - exact).mean() / np.abs(exact).mean() < 0.05


@pytest.mark.parametrize("rule", [ABSOLUTE, CONSTANT])
def test_a_bias_before_a_gelu_is_added_in_passing(rule: RowRule) -> None:
    b = normal(N, seed=6)
    model = graph(
        "p = MatMul (x, w)\n y = com.microsoft.BiasGelu (p, b)", **{"w": normal(K, N, seed=5)} | {"b": b}
    )
    (linears,) = find_linears(model.graph)
    product = RowProduct(None, rule, WEIGHT)
    quantize_encoder(model, {linears.names: product})
    assert not nodes(model, "BiasGelu") and len(nodes(model, "Gelu")) == 1
    assert len(nodes(model, "Add")) == (rule.step is None)
    x = normal(2, 3, K, seed=7)
    (got,) = run_graph(model, x=x)
    sums = torch.from_numpy(integers(x, product) + b)
    want = torch.nn.functional.gelu(sums).numpy()
    assert np.median(np.abs(got - want)) <= 1e-5 * np.abs(want).max()


def test_attention_s_products_are_told_from_a_gate_s() -> None:
    """Queries, keys and values read one value, as a GLU's gate and its other half do."""
    body = """
        q = MatMul (x, wq)
        qb = Add (q, bq)
        k = MatMul (x, wk)
        kt = Transpose <perm = [0, 2, 1]> (k)
        v = MatMul (x, wv)
        scores = MatMul (qb, kt)
        weights = Softmax (scores)
        hides = IsNaN (weights)
        shown = Where (hides, zero, weights)
        context = MatMul (shown, v)
        out = MatMul (context, wo)
        gate = MatMul (out, wg)
        up = MatMul (out, wu)
        open = Sigmoid (gate)
        both = Mul (open, up)
        y = MatMul (both, wd)
    """
    names = ("wq", "wk", "wv", "wo", "wg", "wu", "wd")
    shapes = dict.fromkeys(names, (K, K)) | {"wd": (K, N)}
    arrays = {name: normal(*shape, seed=len(shape)) for name, shape in shapes.items()}
    model = graph(body, **arrays, bq=normal(K), zero=np.zeros(1, np.float32))
    found = find_attention_products(model.graph)
    assert {node.inputs[1].name for node in found if node.inputs[1]} == {"wq", "wk", "wv"}


rows = st.integers(0, 2**32 - 1).flatmap(
    lambda seed: st.tuples(st.just(seed), st.floats(0.001, 30), st.floats(-5, 5), st.integers(2, 40))
)


@settings(deadline=None, max_examples=100)
@given(rows)
def test_every_row_keeps_its_range_whatever_the_others_reach(
    given: tuple[int, float, float, int],
) -> None:
    seed, spread, offset, count = given
    x = (normal(count, 16, seed=seed) * spread + offset).astype(np.float32)
    rule = RowRule.of(x)
    assert 0 <= rule.zero <= 128
    found = rule.round_rows(x)
    largest = np.abs(x).max(1) if rule.absolute else x.max(1)
    step = np.maximum(largest, rule.floor) / (127 if rule.absolute else 255 - rule.zero)
    # No value is clipped, so each is off by half a step at most.
    reach = np.abs(x) if rule.absolute else np.maximum(x, 0)
    inside = reach.max(1) <= np.maximum(largest, rule.floor) * (1 + 1e-6)
    assert inside.all()
    below = -x.min(1) <= rule.zero * step * (1 + 1e-5) + 1e-6
    off = np.abs(found - x).max(1)
    assert (off[below] <= step[below] * 0.501 + 1e-6).all()


def test_alike_rows_share_a_step_and_rows_of_other_sizes_do_not() -> None:
    weight = normal(K, N, seed=2)
    alike, fresh = np.random.default_rng(1).uniform(-1, 1, (2, 1000, K)).astype(np.float32)
    chosen = choose_product(alike, weight).compensate(alike, weight)
    assert chosen.rule.step is not None and chosen.error is not None
    limit = np.abs(alike if chosen.smoothing is None else alike / chosen.smoothing).max()
    assert limit < chosen.rule.step * 127 < 1.5 * limit  # other rows may reach a little further
    exact = fresh @ weight
    error = np.square(integers(fresh, chosen) - exact).sum() / np.square(exact).sum()
    # The choice counts half of the weight's error; GPTQ gains nothing where columns are independent.
    assert 0.5 * chosen.error < error < 4 * chosen.error < 5e-4
    other_sizes = alike * np.exp(2 * normal(1000, 1, seed=4))
    assert choose_product(other_sizes, weight).rule.step is None


def test_a_column_of_outliers_is_smoothed_and_an_even_matrix_is_not() -> None:
    x = normal(1000, K, seed=1)
    weight = normal(K, N, seed=2)
    x *= np.exp(2 * normal(1000, 1, seed=4))  # rows of one length would share a step, which is smoothed
    assert choose_product(x, weight).smoothing is None
    outliers = x.copy()
    outliers[:, 5] *= 60
    weight[5] /= 60
    chosen = choose_product(outliers, weight).compensate(outliers, weight)
    assert chosen.smoothing is not None
    assert chosen.smoothing[5] == chosen.smoothing.max() > 5 * np.median(chosen.smoothing)
    fresh = normal(500, K, seed=3) * np.exp(2 * normal(500, 1, seed=6))
    fresh[:, 5] *= 60
    exact = fresh @ weight
    error = np.square(integers(fresh, chosen) - exact).sum() / np.square(exact).sum()
    plain = RowProduct(None, RowRule.of(outliers), rounded_columns(weight))
    assert error < 0.5 * np.square(integers(fresh, plain) - exact).sum() / np.square(exact).sum()
    assert chosen.error is not None and 0.2 * error < chosen.error < 5 * error


def rounded_columns(weight: Array) -> QuantizedWeight:
    scale = np.abs(weight).max(0) / 127
    return QuantizedWeight(np.rint(weight / scale).astype(np.int8).T, scale[:, None], INT8)


@pytest.fixture(scope="module")
def minilm_int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8") / "minilm"
    return export("bert-demo", folder, precision=["int8"], target=["cpu"]).bundle


def test_sentences_keep_their_vectors(minilm_int8: Path, minilm_bundle: Path) -> None:
    """Of a book that calibrated nothing: the mean and the least cosine that the issue of int8 asks for."""
    text = (DEMOS / "gpt2-demo" / "prompts.txt").read_text(encoding="utf-8")
    found = [sentence.strip() for sentence in re.split(r"[.:;?]", text) if len(sentence.split()) > 3]
    sentences = found[:: max(1, len(found) // 100)][:100]
    assert len(sentences) > 60
    with (
        TextEncoder.load(minilm_int8, threads=1) as small,
        TextEncoder.load(minilm_bundle, threads=1) as exact,
    ):
        cosines = (small.embed(sentences) * exact.embed(sentences)).sum(-1)
        pairs = exact.embed(sentences) @ exact.embed(sentences).T
        np.testing.assert_array_equal(small.embed(sentences[:9])[3], small.embed(sentences[3]))
    assert np.median(pairs) < 0.5  # else every vector would be near every other
    assert cosines.mean() >= 0.999 and cosines.min() >= 0.99


def test_the_manifest_says_what_was_chosen_and_what_it_cost(minilm_int8: Path) -> None:
    (artifact,) = Bundle.open(minilm_int8).manifest.artifacts
    assert artifact.gate["passed"] and artifact.gate["measured"]["sentence_embedding.mean_cosine_gap"] < 0.001
    assert 0 < artifact.gate["measured"]["sentence_embedding.order.rank_changes"] < 0.05
    chosen = artifact.quantization["rows"]
    assert len(chosen) == 6 * 4  # query, key and value together; the three other linears of each layer
    for product in chosen.values():
        assert set(product) == {"zero", "floor", "absolute", "step", "smoothed", "error"}
        assert 0 < product["error"] < 0.01


def test_a_translator_in_int8_keeps_its_answers(tmp_path: Path, dates_bundle: Path) -> None:
    options: dict[str, Any] = {"precision": ["int8"], "target": ["cpu"], "verify": "quick"}
    folder = export("transformer-demo", tmp_path / "dates", **options).bundle
    assert all(artifact.gate["passed"] for artifact in Bundle.open(folder).manifest.artifacts)
    texts = ["the 3rd of May, 1998", "12/25/2003", "July 4, 1976", "1 Jan 2000"]
    with Translator.load(folder, threads=1) as small, Translator.load(dates_bundle, threads=1) as exact:
        found = [answer.text for answer in small.translate(texts)]
        assert found == [answer.text for answer in exact.translate(texts)]
    assert len(set(found)) == len(texts)
