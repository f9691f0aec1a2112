"""What reading a graph finds: epsilons, scales and weights that are not the model's, however small."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from planforge.exporter import export
from planforge.exporter.passes import tables
from planforge.exporter.passes.fp16 import convert_to_fp16
from planforge.exporter.passes.fp16_ranges import Fp32Reason
from planforge.exporter.passes.weights import ParameterRef
from planforge.exporter.verification.attributes import find_wrong_epsilons
from planforge.models import (
    BertConfig,
    GPT2Config,
    LlamaConfig,
    ModernBertConfig,
    TransformerConfig,
)
from planforge.runtime.bundle.bundle import Bundle

from ...helpers.faults import Plant, change_weight, constant, node_of, perturbed, scale_factor, weight_of
from ...helpers.graphs import nodes, parse_graph, replace_graph
from ...helpers.reader import Reader


def faults_read(bundle: Path, artifact: str) -> tuple[str, ...]:
    return Reader(bundle, None).read(artifact)


@pytest.mark.parametrize(
    "stored",
    [
        ParameterRef("wte.weight.transposed", transposed=True),
        ParameterRef("a.weight", transposed=True, shift=13),
        ParameterRef("wte.weight", first=6283),
    ],
)
def test_a_file_says_how_a_parameter_is_stored(tmp_path: Path, stored: ParameterRef) -> None:
    model = parse_graph(
        """<ir_version: 10, opset_import: ["" : 20]>
        sum (float[1] x) => (float[1] y) <float[1] w = {1}> { y = Add (x, w) }"""
    )
    assert ParameterRef.read(model.graph.initializers["w"]) == ParameterRef("w")
    stored.write(model.graph.initializers["w"])
    ir.save(model, tmp_path / "sum.onnx")
    assert ParameterRef.read(ir.load(tmp_path / "sum.onnx").graph.initializers["w"]) == stored


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_scale_that_is_a_constant_is_read(own_bundle: Path, precision: str) -> None:
    artifact = f"decoder.portable.{precision}"
    assert faults_read(own_bundle, artifact) == ()
    replace_graph(own_bundle, artifact, scale_factor("h.2.attn", 1.002))
    fault, *_ = faults_read(own_bundle, artifact)
    assert "of h.2.attn gives" in fault and "which 'h.2.attn.c_proj' reads" in fault


def multiply_constant(op_type: str, read: str | None, factor: float) -> Plant:
    """The one number of the first node of a kind, behind a kind of node, a little larger."""

    def plant(model: ir.Model) -> None:
        for node in nodes(model, op_type):
            behind = node.inputs[0].producer() if node.inputs[0] is not None else None
            number = node.inputs[1].const_value if node.inputs[1] is not None else None
            grouped = node.outputs[0].shape is not None and len(node.outputs[0].shape) == 5
            if number is not None and number.size == 1 and (grouped if read is None else is_a(behind, read)):
                wrong = np.asarray(factor * number.numpy(), np.float32)
                node.replace_input_with(1, constant(model, "wrong", wrong))
                return
        raise AssertionError("no such node")

    return plant


def is_a(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and node.op_type == op_type


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (multiply_constant("Mul", None, 1.002), "of layers.0.self_attn gives"),
        (multiply_constant("Add", "ReduceMean", 1.01), "of layers.0.attention_norm gives"),
    ],
)
def test_scales_of_grouped_heads_and_epsilons_in_plain_operators_are_read(
    llama_bundle: Callable[[str], Path], tmp_path: Path, plant: Plant, message: str
) -> None:
    own = Path(shutil.copytree(llama_bundle("qwen3"), tmp_path / "qwen3")) / "bundle"
    assert faults_read(own, "decoder.portable.fp32") == ()
    replace_graph(own, "decoder.portable.fp32", plant)
    fault, *_ = faults_read(own, "decoder.portable.fp32")
    assert message in fault


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(),
        BertConfig(),
        LlamaConfig(),
        ModernBertConfig(num_hidden_layers=1, layer_types=("full_attention",)),
        TransformerConfig(source_vocab_size=9, target_vocab_size=9),
    ],
    ids=lambda config: type(config).__name__,
)
def test_the_epsilon_of_every_model_is_read(config: Any) -> None:
    model = parse_graph(
        """<ir_version: 10, opset_import: ["" : 20]>
        norm (float[2, 4] x) => (float[2, 4] y) <float[4] w = {1, 1, 1, 1}>
        { y = LayerNormalization <epsilon = 0.001> (x, w) }"""
    )
    (fault,) = find_wrong_epsilons(model.graph, dataclasses.asdict(config))
    assert "has epsilon 0.001, the model's is 1e-" in fault


def test_weights_of_scaled_products_are_read(own_bundle: Path) -> None:
    def scaled(model: ir.Model) -> None:
        full = ir.load(own_bundle / Bundle.open(own_bundle).manifest.artifact("decoder.portable.fp32").file)
        product = node_of(full, "h.1.mlp.c_proj", "MatMul", "Gemm")
        convert_to_fp16(full, ["logits"], {str(product.name): Fp32Reason(reached=4e5, shift=3)})
        model.graph = full.graph

    replace_graph(own_bundle, "decoder.portable.fp16", scaled)
    assert faults_read(own_bundle, "decoder.portable.fp16") == ()
    replace_graph(own_bundle, "decoder.portable.fp16", perturbed("h.1.mlp.c_proj"))
    (fault,) = faults_read(own_bundle, "decoder.portable.fp16")
    assert "times2^-3" in fault
    assert "of h.1.mlp.c_proj is not the checkpoint's" in fault


def test_parts_of_a_large_table_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SPLIT_FROM_ROWS", 1000)
    bundle = export("gpt2-demo", tmp_path / "bundle", target=["cpu"], max_length=64, verify=False).bundle
    assert faults_read(bundle, "decoder.ort.fp32") == ()
    parts: list[str] = []

    def change(model: ir.Model) -> None:
        parts.extend(name for name in model.graph.initializers if ".rows." in name)
        change_weight(model.graph.initializers[parts[-1]], lambda weight: weight * 1.01)

    replace_graph(bundle, "decoder.ort.fp32", change)
    assert len(parts) == tables.PARTS
    (fault,) = faults_read(bundle, "decoder.ort.fp32")
    assert f"{parts[-1]!r} of node" in fault


def test_a_matrix_that_the_checkpoint_does_not_have_is_told(own_bundle: Path) -> None:
    def rename(model: ir.Model) -> None:
        weight = weight_of(model, "h.1.mlp.c_fc")
        weight.name = "mine"
        ParameterRef("mine", transposed=True).write(weight)

    replace_graph(own_bundle, "decoder.portable.fp32", rename)
    fault, *_ = faults_read(own_bundle, "decoder.portable.fp32")
    assert "'mine'" in fault
    assert "of h.1.mlp.c_fc is not a tensor of the checkpoint" in fault
