"""Attention as one node gives what its parts gave; other forms of it stay as they are.

B batch, T tokens, H heads, D head size
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from planforge.exporter.passes.encoder_attention import OPSET, fuse_attention

from ...helpers.graphs import nodes, normal, parse_graph, run_graph

B = 2
T = 5
H = 3
D = 8
E = H * D
SPLIT = f"""
    heads = Constant <value = int64[4] {{0, 0, {H}, {D}}}> ()
    whole = Constant <value = int64[3] {{0, 0, {E}}}> ()
    scale = Constant <value = float {{0.3}}> ()
"""
LAYER = """
    q{n} = Reshape ({x}, heads)
    k{n} = Reshape (k, heads)
    v{n} = Reshape (v, heads)
    qt{n} = Transpose <perm = [0, 2, 1, 3]> (q{n})
    kt{n} = Transpose <perm = [0, 2, 3, 1]> (k{n})
    vt{n} = Transpose <perm = [0, 2, 1, 3]> (v{n})
    {turn}
    qs{n} = Mul (qt{n}, scale)
    scores{n} = MatMul (qs{n}, kt{n})
    masked{n} = Add (scores{n}, bias)
    weights{n} = Softmax <axis = -1> (masked{n})
    context{n} = MatMul (weights{n}, vt{n})
    joined{n} = Transpose <perm = [0, 2, 1, 3]> (context{n})
    {y} = Reshape (joined{n}, whole)
"""


def make_graph(body: str, queries: str = "1") -> ir.Model:
    """Return a graph of queries, keys and values (B, T, E) and a bias (B, 1, 1 or T, T)."""
    text = f"float[b, t, {E}] x, float[b, t, {E}] k, float[b, t, {E}] v, float[b, 1, {queries}, t] bias"
    model = parse_graph(
        f'<ir_version: 10, opset_import: ["" : 20]> g ({text}) => (float[b, t, {E}] y) {{ {SPLIT} {body} }}'
    )
    shapes = {"context": ("b", H, "t", D)}
    for node in model.graph:
        for value in node.outputs:
            if str(value.name).startswith(tuple(shapes)):
                value.shape = ir.Shape(shapes["context"])
            if str(value.name) == "middle":
                value.shape = ir.Shape(("b", "t", E))
    lift_constants(model)
    return model


def lift_constants(model: ir.Model) -> None:
    """Make initializers of Constant nodes, as the exporter's graphs have them."""
    ir.passes.common.LiftConstantsToInitializersPass(size_limit=0)(model)


def make_inputs(queries: int) -> dict[str, npt.NDArray[np.float32]]:
    bias = np.where(normal(B, 1, queries, T, seed=4) > 1, np.float32(-1e9), np.float32(0))
    bias[..., 0] = 0  # every row sees something
    return {name: normal(B, T, E, seed=seed) for seed, name in enumerate("xkv")} | {"bias": bias}


@pytest.mark.parametrize("queries", [1, T])
def test_one_node_gives_what_the_parts_gave(queries: int) -> None:
    first = LAYER.format(n=1, x="x", turn="", y="middle")
    body = first + LAYER.format(n=2, x="middle", turn="", y="y")
    model = make_graph(body, "1" if queries == 1 else "t")
    inputs = make_inputs(queries)
    (want,) = run_graph(model, **inputs)
    fuse_attention(model)
    found = nodes(model, "Attention")
    assert len(found) == 2 and not nodes(model, "Softmax") and not nodes(model, "Transpose")
    assert all(node.attributes["scale"].as_float() == pytest.approx(0.3) for node in found)
    assert len(nodes(model, "Expand")) == (queries == 1)  # once for both layers
    assert model.graph.opset_imports[""] == OPSET
    (got,) = run_graph(model, **inputs)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_queries_that_are_turned_are_left_alone() -> None:
    body = LAYER.format(n=1, x="x", turn="", y="y").replace(
        "qs1 = Mul (qt1", "qn1 = Neg (qt1)\n qs1 = Mul (qn1"
    )
    model = make_graph(body)
    fuse_attention(model)
    assert not nodes(model, "Attention") and len(nodes(model, "Softmax")) == 1
    assert model.graph.opset_imports[""] == 20


def test_attention_without_a_mask_is_onnx_runtimes_own() -> None:
    body = LAYER.format(n=1, x="x", turn="", y="y")
    body = body.replace("masked1 = Add (scores1, bias)", "").replace("(masked1)", "(scores1)")
    model = make_graph(body)
    for node in model.graph:
        node.metadata_props["module"] = "attn"
    inputs = make_inputs(1) | {"x": normal(B, T + 2, E), "bias": normal(B, 1, 1, T + 2)}  # fewer keys
    (want,) = run_graph(model, **inputs)
    fuse_attention(model)
    (fused,) = nodes(model, "MultiHeadAttention")
    assert not nodes(model, "Softmax") and not nodes(model, "Transpose")
    assert fused.attributes["scale"].as_float() == pytest.approx(0.3)
    assert fused.metadata_props["module"] == "attn"
    (got,) = run_graph(model, **inputs)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
