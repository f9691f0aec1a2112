"""FP16 safety of the Llama family: a Qwen and a Gemma with planted outliers beyond fp16's range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from safetensors.torch import load_file

from planforge.exporter import export
from planforge.exporter.calibration import calibration
from planforge.exporter.errors import VerificationError
from planforge.exporter.execution.node_executor import NodeExecutor, NotFiniteError
from planforge.exporter.passes.fp16 import convert_to_fp16
from planforge.exporter.passes.fp16_ranges import FP16_MAX, choose_fp32_nodes, read_choices
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.graphs import normal
from ...helpers.half import make_prefill, measure_fp32_share
from ...helpers.llamas import shallow_llama, write_dialects
from ...helpers.models import edit_weights
from ...helpers.plans import without_plans

TOKENS = [5, 300, 17, 64, 9, 120, 1000, 3]
SHARE = 0.15


def plant_in_mlp(folder: Path) -> None:
    """A channel of each MLP 131,072 times as large, as Qwen's are, and its weights behind as much smaller."""
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


def plant_in_residual_stream(folder: Path) -> None:
    """All that a layer adds 131,072 times as large, as Gemma's norms behind attention and MLP make it."""
    weights = load_file(folder / "model.safetensors")
    behind = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
    changed = {name: (1 + w) * 2.0**17 - 1 for name, w in weights.items() if name.endswith(behind)}
    edit_weights(folder, **changed)


PLANTED: dict[str, Callable[[Path], None]] = {
    "qwen3": plant_in_mlp,
    "gemma 2": plant_in_residual_stream,
}


@dataclass(frozen=True)
class Exported:
    checkpoint: Path
    bundle: Bundle
    graphs: dict[str, ir.Model]


@pytest.fixture(scope="module", params=PLANTED)
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("planted")
    shallow_llama(folder / "checkpoint", request.param)
    PLANTED[request.param](folder / "checkpoint")
    options: dict[str, Any] = {"precision": ["fp32", "fp16"], "target": ["portable", "rtx"]}
    with without_plans():
        result = export(folder / "checkpoint", folder / "bundle", verify="quick", **options)
    bundle = Bundle.open(result.bundle)
    graphs = {a.id: ir.load(bundle.path(a.file)) for a in bundle.manifest.artifacts}
    return Exported(folder / "checkpoint", bundle, graphs)


@pytest.mark.parametrize("dialect", ["portable", "inplace"])
def test_plain_fp16_is_not_finite_and_the_safe_graph_passes(planted: Exported, dialect: str) -> None:
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


def test_squares_of_small_numbers_keep_their_bits(tmp_path: Path) -> None:
    """Embeddings of a thousandth, as Mistral's are: their squares are below fp16's normal numbers."""
    shallow_llama(tmp_path / "checkpoint", "qwen3")
    added = ("embed_tokens.weight", "o_proj.weight", "down_proj.weight")
    weights = load_file(tmp_path / "checkpoint/model.safetensors")
    edit_weights(
        tmp_path / "checkpoint", **{name: w / 64 for name, w in weights.items() if name.endswith(added)}
    )
    write_dialects(tmp_path / "checkpoint", tmp_path / "bundle", ["portable"])
    full = ir.load(tmp_path / "bundle/onnx/decoder.portable.onnx")
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
    model = ir.from_proto(onnx.parser.parse_model(GROUPED))
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
    shallow_llama(tmp_path / "checkpoint", "qwen3")
    plant_in_mlp(tmp_path / "checkpoint")
    monkeypatch.setattr(calibration, "choose_fp32_nodes", lambda graph, ranges: choose_fp32_nodes(graph, {}))
    options: dict[str, Any] = {"precision": ["fp32", "fp16"], "target": ["portable"], "verify": "quick"}
    with pytest.raises(VerificationError, match=r"decoder\.portable\.fp16"):
        export(tmp_path / "checkpoint", tmp_path / "bundle", **options)
