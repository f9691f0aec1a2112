"""Graphs of mixtures of experts: which experts they compute, in which precision they choose, and gates."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from safetensors import safe_open

from planforge.exporter import export, lint
from planforge.exporter.passes.fp16_ranges import Fp32Reason
from planforge.exporter.passes.routing import chooses_experts
from planforge.exporter.tracing.modules import find_module
from planforge.models import load_model
from planforge.runtime import TextEncoder
from planforge.runtime.backends.dialects import explain_misfit_on_cuda
from planforge.runtime.bundle.bundle import Bundle
from planforge.runtime.errors import InputError

from ..helpers.llamas import LLAMAS, tiny_llama
from ..helpers.models import edit_json

CHOSEN = 3  # by each token, of 6 experts
LIMIT = 1e-4
# A rounding may move a token to another expert, in PyTorch too: then logits of that token are others.
ANY_LOSS = dict.fromkeys(("max_error", "mean_kl", "text_kl", "top1_changes", "perplexity_change"), 9.0)
TEXTS = ["In the beginning", "And the earth was without form, and void; and darkness was upon", "And"]


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("olmoe") / "checkpoint"
    tiny_llama(folder, "olmoe", num_hidden_layers=2)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Qwen3-MoE that classifies texts."""
    folder = tmp_path_factory.mktemp("classifier") / "checkpoint"
    tiny_llama(folder, "qwen3-moe", num_hidden_layers=2)  # for its tokenizer
    kind, settings = LLAMAS["qwen3-moe"]
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=3, pad_token_id=1)
    transformers.set_seed(0)
    model: Any = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    assert settings["num_experts_per_tok"] == CHOSEN
    return folder


def load_graph(bundle: Path, identity: str) -> ir.Graph:
    (path,) = (bundle / "onnx").glob(f"{identity}*.onnx")
    return ir.load(path).graph


def list_computed_splits(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes that split rows into parts whose lengths the graph computes."""
    lengths = [(node, node.inputs[1]) for node in graph if node.op_type == "Split" and len(node.inputs) > 1]
    return [node for node, value in lengths if value is not None and value.producer() is not None]


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_each_precision_is_verified(olmoe: Path, tmp_path: Path, precision: str) -> None:
    how: dict[str, Any] = {"target": ["portable" if precision == "fp16" else "cpu"], "accept": ANY_LOSS}
    found = export(olmoe, tmp_path / "bundle", precision=[precision], verify="quick", **how)
    assert found.report is not None and found.report.passed
    assert len(found.report.comparisons) > 4


def test_routers_choose_in_fp32(olmoe: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    export(olmoe, bundle, precision=["fp16"], target=["portable"], verify=False)
    graph = load_graph(bundle, "decoder.portable.fp16")
    routers = [node for node in graph if chooses_experts(node)]
    assert [find_module(node) for node in routers] == [f"layers.{layer}.mlp.gate" for layer in (0, 1)]
    choices = [node for node in graph if node.op_type == "TopK"]
    assert len(choices) == 2
    for node in (*routers, *choices):
        assert node.outputs[0].dtype == ir.DataType.FLOAT
        assert Fp32Reason.read(node) == Fp32Reason("chooses experts")
    experts = [node for node in graph if ".experts." in find_module(node) and node.op_type == "Gemm"]
    assert len(experts) == 2 * 6 * 3
    assert {node.outputs[0].dtype for node in experts} == {ir.DataType.FLOAT16}


def test_a_graph_of_all_experts_is_said(
    olmoe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "planforge"):
        export(olmoe, tmp_path / "cpu", precision=["fp32"], target=["cpu"], verify=False)
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING, "planforge"):
        export(olmoe, tmp_path / "both", precision=["fp32"], target=["cpu", "portable"], verify=False)
    (message,) = caplog.messages
    assert message.startswith("decoder.portable computes all 6 experts for every token")
    assert len(list_computed_splits(load_graph(tmp_path / "both", "decoder.ort"))) == 2
    assert list_computed_splits(load_graph(tmp_path / "both", "decoder.portable")) == []


def test_a_gpu_gets_graphs_of_all_experts(olmoe: Path, classifier: Path, tmp_path: Path) -> None:
    """ONNX Runtime reads the lengths of a Split's parts on the host before the GPU has computed them."""
    how: dict[str, Any] = {"target": ["cpu", "cuda"], "precision": ["fp32", "fp16"], "verify": False}
    for name, folder in (("decoder", olmoe), ("encoder", classifier)):
        export(folder, tmp_path / name, **how)
        graphs = {artifact.id: artifact for artifact in Bundle.open(tmp_path / name).manifest.artifacts}
        assert list(graphs) == [f"{name}.ort.fp32", f"{name}.portable.fp32", f"{name}.portable.fp16"]
        on_cpu, *on_gpu = graphs.values()
        assert "reads on the host before the GPU has computed them" in explain_misfit_on_cuda(on_cpu)
        assert [explain_misfit_on_cuda(artifact) for artifact in on_gpu] == ["", ""]
    wrong = [
        found.rule for found in lint(tmp_path / "decoder", ["cuda"]).findings if found.severity == "wrong"
    ]
    assert wrong == []


def test_a_mixture_that_classifies_is_transformers(classifier: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"precision": ["fp32"], "target": ["cpu", "portable"], "verify": "quick"}
    export(classifier, tmp_path / "bundle", **how)
    assert len(list_computed_splits(load_graph(tmp_path / "bundle", "encoder.ort"))) == 1
    assert list_computed_splits(load_graph(tmp_path / "bundle", "encoder.portable")) == []
    reference: Any = transformers.AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    with TextEncoder.load(tmp_path / "bundle") as model:
        scores = model.classify(TEXTS)
        ids = [model.tokenizer.encode(text) for text in TEXTS]
    for score, tokens in zip(scores, ids, strict=True):
        with torch.no_grad():
            wanted = reference(torch.tensor([tokens])).logits[0].softmax(-1).numpy()
        np.testing.assert_allclose([score.probabilities[label] for label in model.labels], wanted, atol=LIMIT)


def test_experts_may_be_stacked_in_the_files(olmoe: Path, tmp_path: Path) -> None:
    """As transformers has them in memory, and writes them where it is asked for its own names."""
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(olmoe)
    theirs.save_pretrained(tmp_path, save_original_format=False)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.0.mlp.experts.gate_up_proj").get_shape() == [6, 2 * 96, 64]
    own, found = load_model(olmoe).state_dict(), load_model(tmp_path).state_dict()
    assert own.keys() == found.keys()
    assert all(torch.equal(own[name], found[name]) for name in own)
    edit_json(tmp_path / "config.json", num_experts=5)
    with pytest.raises(ValueError, match=r"experts\.down_proj has 384 rows, config.json means 320"):
        load_model(tmp_path)


def test_no_graphs_explain_a_mixture(olmoe: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="output 'explain' is not for mixtures of experts; leave it out"):
        export(olmoe, tmp_path / "bundle", outputs=["explain"], target=["cpu"])


def test_the_gradients_of_experts_are_those_of_transformers(olmoe: Path) -> None:
    """Those of an expert that no token chose are zero there and none here."""
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(olmoe)
    ours: Any = load_model(olmoe).requires_grad_(True)
    ids = torch.arange(5, 7)[None]
    theirs(ids).logits[0, -1].log_softmax(-1)[7].backward()
    ours(ids)[0][0, -1].log_softmax(-1)[7].backward()
    wanted = theirs.model.layers[0].mlp.experts.down_proj.grad
    found = [expert.down_proj.weight.grad for expert in ours.layers[0].mlp.experts]
    near = 1e-5 * wanted.abs().max().item()
    for gradient, expected in zip(found, wanted, strict=True):
        own = torch.zeros_like(expected) if gradient is None else gradient
        torch.testing.assert_close(own, expected, atol=near, rtol=0)
    assert 0 < sum(bool(gradient.any()) for gradient in wanted) < len(found)
    gate = theirs.model.layers[0].mlp.gate.weight.grad
    torch.testing.assert_close(ours.layers[0].mlp.gate.weight.grad, gate, atol=1e-5, rtol=1e-4)
