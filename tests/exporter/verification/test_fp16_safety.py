"""What stays in fp32 in an fp16 graph: chosen by ranges on real text, so that nothing overflows."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from planforge.exporter import export
from planforge.exporter.calibration import calibration
from planforge.exporter.checkpoints.source import DEMOS
from planforge.exporter.errors import VerificationError
from planforge.exporter.execution.node_executor import NodeExecutor, NotFiniteError
from planforge.exporter.passes.fp16 import convert_to_fp16
from planforge.exporter.passes.fp16_ranges import (
    FP16_MAX,
    HEADROOM,
    SMALLEST_SPREAD,
    Fp32Reason,
    choose_fp32_nodes,
    read_choices,
)
from planforge.models import load_model
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.graphs import normal, parse_graph
from ...helpers.half import make_prefill, measure_fp32_share
from ...helpers.llamas import shallow_llama, write_dialects
from ...helpers.models import edit_weights
from ...helpers.plans import without_plans

SCALE = 20_000.0  # the residual stream of gpt2-demo reaches about 11
SHARE = 0.15
TOKENS = [5, 300, 17, 64, 9, 120, 1000, 3]


def write_overflowing_gpt2(folder: Path) -> None:
    """gpt2-demo with all that is added to its residual stream `SCALE` times as large.

    Each LayerNorm takes the scale out again, so it is the same function, but for epsilon; its head is untied.
    """
    shutil.copytree(DEMOS / "gpt2-demo", folder)
    weights = load_file(folder / "model.safetensors")
    head = next(tensor for name, tensor in weights.items() if name.endswith("wte.weight")).clone()
    for name, tensor in weights.items():
        if name.endswith(("wte.weight", "wpe.weight")) or "c_proj" in name:
            weights[name] = tensor.float() * SCALE
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))


def write_overflowing_qwen3(folder: Path) -> None:
    """A channel of each MLP 131,072 times as large, as Qwen's are, and its weights behind as much smaller."""
    shallow_llama(folder, "qwen3")
    weights = load_file(folder / "model.safetensors")
    changed = {}
    for name, tensor in weights.items():
        if name.endswith("up_proj.weight"):
            changed[name] = tensor.clone()
            changed[name][7] *= 2.0**17
        if name.endswith("down_proj.weight"):
            changed[name] = tensor.clone()
            changed[name][:, 7] *= 2.0**-17
    edit_weights(folder, **changed)


def write_overflowing_gemma_2(folder: Path) -> None:
    """All that a layer adds 131,072 times as large, as Gemma's norms behind attention and MLP make it."""
    shallow_llama(folder, "gemma 2")
    weights = load_file(folder / "model.safetensors")
    behind = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
    changed = {name: (1 + w) * 2.0**17 - 1 for name, w in weights.items() if name.endswith(behind)}
    edit_weights(folder, **changed)


WRITERS = {
    "gpt2": write_overflowing_gpt2,
    "qwen3": write_overflowing_qwen3,
    "gemma 2": write_overflowing_gemma_2,
}


@dataclass(frozen=True)
class Exported:
    checkpoint: Path
    bundle: Bundle
    graphs: dict[str, ir.Model]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """A checkpoint of `WRITERS`, and its graphs, verified quickly."""

    @functools.cache
    def export_once(name: str) -> Exported:
        folder = tmp_path_factory.mktemp("overflow")
        WRITERS[name](folder / "checkpoint")
        options: dict[str, Any] = {"precision": ["fp32", "fp16"], "target": ["portable", "rtx"]}
        if name == "gpt2":
            options["max_length"] = 96
        with without_plans():
            result = export(folder / "checkpoint", folder / "bundle", verify="quick", **options)
        bundle = Bundle.open(result.bundle)
        graphs = {a.id: ir.load(bundle.path(a.file)) for a in bundle.manifest.artifacts}
        return Exported(folder / "checkpoint", bundle, graphs)

    return export_once


@pytest.fixture
def overflowing(exported: Callable[[str], Exported]) -> Exported:
    return exported("gpt2")


@pytest.mark.parametrize("dialect", ["portable", "inplace"])
@pytest.mark.parametrize("name", WRITERS)
def test_plain_fp16_is_not_finite_and_the_safe_graph_passes(
    name: str, dialect: str, exported: Callable[[str], Exported]
) -> None:
    planted = exported(name)
    plain = planted.graphs[f"decoder.{dialect}.fp32"].clone()
    convert_to_fp16(plain, ["logits"])
    with pytest.raises(NotFiniteError, match=r"inf|nan"):
        NodeExecutor(plain).run(make_prefill(plain, TOKENS))
    artifact = planted.bundle.manifest.artifact(f"decoder.{dialect}.fp16")
    assert artifact.passed
    safe = planted.graphs[artifact.id]
    NodeExecutor(safe).run(make_prefill(safe, TOKENS))
    reached = [choice.reached for choice in read_choices(safe.graph).values() if choice.reached is not None]
    assert max(reached) > FP16_MAX
    assert measure_fp32_share(safe.graph) < SHARE


def test_the_model_is_the_same_function_and_its_residual_stream_overflows(overflowing: Exported) -> None:
    ids = torch.tensor([[5, 300, 17, 64, 9, 120]])
    models = [load_model(folder).eval() for folder in (overflowing.checkpoint, DEMOS / "gpt2-demo")]
    with torch.no_grad():
        scaled, plain = (model(ids)[0] for model in models)
        reached: list[float] = []
        last = models[0].get_submodule("h.3")
        last.register_forward_hook(lambda _, __, out: reached.append(float(out.abs().max())))
        models[0](ids)
    # What epsilon is to a variance that is a 400-millionth: the logits' spread is about 2.
    torch.testing.assert_close(scaled, plain, rtol=0, atol=0.01)
    assert reached[0] > FP16_MAX


def test_the_safe_graph_gives_the_logits_of_pytorch(overflowing: Exported) -> None:
    safe = overflowing.graphs["decoder.portable.fp16"]
    got = NodeExecutor(safe).run(make_prefill(safe, TOKENS))["logits"]
    with torch.no_grad():
        want = load_model(overflowing.checkpoint).eval()(torch.tensor([TOKENS]))[0][0].numpy()
    assert np.abs(got - want).max() < 0.05 * want.std()


@pytest.mark.parametrize("dialect", ["portable", "inplace"])
def test_little_of_the_safe_graph_is_in_fp32(overflowing: Exported, dialect: str) -> None:
    graph = overflowing.graphs[f"decoder.{dialect}.fp16"].graph
    choices = read_choices(graph)
    by_name = {str(node.name): node for node in graph}
    assert all(
        node.op_type in ("LayerNormalization", "Softmax")
        for name, node in by_name.items()
        if choices.get(name) in (Fp32Reason(sums="sums squares"), Fp32Reason(sums="sums exponentials"))
    )
    if dialect == "portable":
        assert_few(overflowing.graphs["decoder.portable.fp32"], choices)
    residual = [
        name
        for name, choice in choices.items()
        if by_name[name].op_type == "Add" and choice.reached is not None
    ]
    assert residual
    assert any(choice.shift for choice in choices.values())


def assert_few(full: ir.Model, choices: Mapping[str, Fp32Reason]) -> None:
    """Nothing but sums stays in fp32 that neither makes nor reads what fp16 cannot hold."""
    largest: dict[str, float] = {}

    def observe(node: ir.Node, name: str, array: np.ndarray) -> None:
        largest[name] = float(np.abs(array).max(initial=0))

    tokens = Tokenizer.from_file(DEMOS / "gpt2-demo" / "tokenizer.json").encode("And it came to pass " * 8)
    NodeExecutor(full, observe).run(make_prefill(full, tokens))
    kept = {name for name, choice in choices.items() if choice.shift is None and not choice.sums}
    nodes = [node for node in full.graph if node.name in kept]
    assert len(nodes) == len(kept) > 0
    for node in nodes:
        near = [str(v.name) for v in (*node.inputs, *node.outputs) if v is not None]
        assert max(largest.get(name, 0.0) for name in near) > FP16_MAX / HEADROOM / 2, node.name


def test_a_healthy_model_keeps_only_sums_in_fp32(demo_bundle: Path) -> None:
    bundle = Bundle.open(demo_bundle)
    for artifact in bundle.manifest.artifacts:
        graph = ir.load(bundle.path(artifact.file)).graph
        kinds = {node.op_type for node in graph if str(node.name) in read_choices(graph)}
        assert kinds <= {"LayerNormalization", "Softmax"}
        assert bool(kinds) == (artifact.precision == "fp16")
        if artifact.precision == "fp16":
            assert measure_fp32_share(graph) == 0


PRODUCT = """
<ir_version: 10, opset_import: ["" : 20]>
product (float[n, 4] x) => (float[n, 4] y)
<float[4, 4] w = {1000, 0, 0, 0, 0, 1000, 0, 0, 0, 0, 1000, 0, 0, 0, 0, 1000}>
{
    p = MatMul (x, w)
    h = Mul (p, p)
    y = Sqrt (h)
}
"""


def test_a_product_is_scaled_by_a_power_of_two_and_what_reads_it_stays_in_fp32() -> None:
    model = parse_graph(PRODUCT)
    x = normal(5, 4) * 60
    want = np.abs(x.astype(np.float16).astype(np.float64) * 1000)
    choices = choose_fp32_nodes(
        model.graph, {"p": float(want.max()), "h": float((want**2).max()), "y": float(want.max())}
    )
    assert choices["node_0"].shift is not None
    assert {name for name, choice in choices.items() if choice.shift is None} == {"node_1", "node_2"}
    convert_to_fp16(model, ["y"], choices)
    got = NodeExecutor(model).run({"x": x.astype(np.float16)})["y"]
    np.testing.assert_allclose(got, want, rtol=2**-10)
    assert read_choices(model.graph)["node_0"] == choices["node_0"]
    assert measure_fp32_share(model.graph) == 0


@given(reached=st.floats(1.0, 1e30))
@settings(deadline=None)
def test_what_is_scaled_fits_and_no_more(reached: float) -> None:
    model = parse_graph(PRODUCT)
    choice = choose_fp32_nodes(model.graph, {"p": reached}).get("node_0")
    if choice is None:
        assert reached * HEADROOM <= FP16_MAX
        return
    spread = 500.0  # of the weights: 4 of 16 are 1000
    if choice.shift is None:
        # The power of two may be twice what is needed.
        assert spread * FP16_MAX / (reached * HEADROOM) < 2 * SMALLEST_SPREAD
        return
    assert spread * 2.0**-choice.shift >= SMALLEST_SPREAD
    scaled = reached * 2.0**-choice.shift
    assert scaled * HEADROOM <= FP16_MAX < 2 * scaled * HEADROOM
    (product, *_) = model.graph
    choice.write(product)
    assert Fp32Reason.read(product) == choice


def test_weights_beyond_fp16_stay_in_fp32() -> None:
    model = parse_graph(PRODUCT.replace("{1000,", "{100000,"))
    choices = choose_fp32_nodes(model.graph, {})
    assert choices == {"node_0": Fp32Reason(reads="w")}
    convert_to_fp16(model, ["y"], choices)
    assert measure_fp32_share(model.graph) == 1


def test_squares_of_small_numbers_keep_their_bits(tmp_path: Path) -> None:
    """Embeddings of a thousandth, as Mistral's are: their squares are below fp16's normal numbers."""
    shallow_llama(tmp_path / "checkpoint", "qwen3")
    added = ("embed_tokens.weight", "o_proj.weight", "down_proj.weight")
    weights = load_file(tmp_path / "checkpoint/model.safetensors")
    edit_weights(
        tmp_path / "checkpoint", **{name: w / 64 for name, w in weights.items() if name.endswith(added)}
    )
    write_dialects(tmp_path / "checkpoint", tmp_path / "bundle", ["portable"])
    (graph,) = (tmp_path / "bundle/onnx").glob("decoder.portable*.onnx")
    full = ir.load(graph)
    want = NodeExecutor(full).run(make_prefill(full, TOKENS * 4))["logits"]
    half = full.clone()
    convert_to_fp16(half, ["logits"])
    off = np.abs(NodeExecutor(half).run(make_prefill(half, TOKENS * 4))["logits"] - want).max()
    assert off < 0.02 * want.std()  # 0.04 where squares, epsilon and roots are fp16


GROUPED = """
<ir_version: 13, opset_import: ["" : 24]>
attend (float16[1, 4, t, 8] q, float16[1, 2, t, 8] k, float16[1, 2, t, 8] v, float16[1, 1, t, t] mask)
    => (float16[1, 4, t, 8] y)
{
    y = Attention <scale = 0.5> (q, k, v, mask)
}
"""


def test_scores_of_grouped_heads_are_seen() -> None:
    model = parse_graph(GROUPED)
    q, k, v = (normal(1, heads, 3, 8, seed=heads + 1).astype(np.float16) for heads in (4, 2, 2))
    inputs = {"q": q, "k": k, "v": v, "mask": np.zeros((1, 1, 3, 3), np.float16)}
    got = NodeExecutor(model).run(inputs)["y"]
    scores = np.einsum("bhtd,bhsd->bhts", q, k.repeat(2, axis=1)) * 0.5
    weights = np.exp(scores.astype(np.float64)) / np.exp(scores.astype(np.float64)).sum(-1, keepdims=True)
    np.testing.assert_allclose(got, weights @ v.repeat(2, axis=1), rtol=0, atol=5e-3)
    large = {**inputs, "q": q * np.float16(300), "k": k * np.float16(300)}
    with pytest.raises(NotFiniteError, match="'y, scores'"):
        NodeExecutor(model).run(large)


def test_without_ranges_the_verification_refuses_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_overflowing_qwen3(tmp_path / "checkpoint")
    monkeypatch.setattr(calibration, "choose_fp32_nodes", lambda graph, ranges: choose_fp32_nodes(graph, {}))
    options: dict[str, Any] = {"precision": ["fp32", "fp16"], "target": ["portable"], "verify": "quick"}
    with pytest.raises(VerificationError, match=r"decoder\.portable\.fp16"):
        export(tmp_path / "checkpoint", tmp_path / "bundle", **options)
