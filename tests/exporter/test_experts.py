"""Mixtures of experts, exported natively: logits and tokens against transformers, and faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from planforge.exporter import export, exporting
from planforge.exporter.errors import CheckpointError, VerificationError
from planforge.models import load_model
from planforge.runtime import TextGenerator
from planforge.runtime.bundle.bundle import Bundle

from ..helpers.models import edit_json
from ..helpers.random_checkpoints import GROUPED, write_tokenizer

TEXTS = ("In the beginning", "And the earth was without form, and void", "Blessed are they")
SIZES: dict[str, Any] = {**GROUPED, "tie_word_embeddings": False}
MIXED: dict[str, Any] = {
    **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "head_dim": 16},
    **{"norm_topk_prob": True, "decoder_sparse_step": 2},
}
CONFIGS: dict[str, Any] = {
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES | MIXED),
    "olmoe": transformers.OlmoeConfig(**SIZES, num_experts=40, num_experts_per_tok=4),
}
LOSSES = ("max_error", "mean_kl", "text_kl", "top1_changes", "perplexity_change")
ANY_LOSS = dict.fromkeys(LOSSES, 1.0) | {"max_error": 10.0}
OPTIONS: dict[str, Any] = {"target": ["cpu", "portable"], "verify": "quick"}


def write_mixture(kind: str, folder: Path) -> Any:
    """Write a random mixture whose experts are chosen by clear margins; return transformers' model."""
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.0 if ".gate." in name else 0.12)
    model.save_pretrained(folder)
    write_tokenizer("gpt_neox", folder)
    return model.eval()


@pytest.fixture(scope="module", params=CONFIGS)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_mixture(request.param, folder / "checkpoint")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral") / "checkpoint"
    write_mixture("mixtral", folder)
    return folder


def test_logits_are_those_of_transformers(mixture: tuple[Path, Any]) -> None:
    folder, theirs = mixture
    ours = load_model(folder / "checkpoint")
    ids = torch.randint(0, 2048, (3, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    with torch.no_grad():
        wanted = theirs(ids, attention_mask=mask).logits
        whole, _ = ours(ids, attention_mask=mask)
        _, past = ours(ids[:, :15], attention_mask=mask[:, :15])
        steps, _ = ours(ids[:, 15:], past, mask)
    seen = mask.bool()
    near = 1e-5 * wanted.abs().max()
    torch.testing.assert_close(whole[seen], wanted[seen], atol=near, rtol=0)
    torch.testing.assert_close(steps, wanted[:, 15:], atol=near, rtol=0)


def test_a_bundle_generates_what_transformers_does(mixture: tuple[Path, Any]) -> None:
    folder, theirs = mixture
    for target in ("cpu", "portable"):
        bundle = folder / target
        export(folder / "checkpoint", bundle, precision=["fp32"], **{**OPTIONS, "target": [target]})
        with TextGenerator.load(bundle) as model:
            prompts = [model.encode_prompt(text) for text in TEXTS]
            answers = model.generate(list(TEXTS), max_new_tokens=12, ignore_eos=True)
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([prompt])
            options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
            wanted = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
            assert list(answer.token_ids) == wanted[0, len(prompt) :].tolist()


def test_only_chosen_experts_are_computed_on_a_cpu(mixture: tuple[Path, Any]) -> None:
    folder, _ = mixture
    if not (folder / "cpu").exists():
        export(folder / "checkpoint", folder / "cpu", precision=["fp32"], target=["cpu"], verify=False)
    artifact = Bundle.open(folder / "cpu").manifest.artifacts[0]
    graph = ir.load(folder / "cpu" / artifact.file).graph
    splits = [node.inputs[1] for node in graph if node.op_type == "Split" and len(node.inputs) > 1]
    computed = [
        next(iter(value.uses())).node
        for value in splits
        if value is not None and value.producer() is not None
    ]
    config = CONFIGS[folder.name.rstrip("0123456789")]
    layers = 1 if getattr(config, "decoder_sparse_step", 1) == 2 else 2
    assert len(computed) == layers
    assert all(len(node.outputs) == config.num_local_experts for node in computed)


def test_int8_passes_the_gate(mixtral: Path, tmp_path: Path) -> None:
    found = export(
        mixtral, tmp_path / "bundle", precision=["int8"], target=["cpu"], verify="quick", accept=ANY_LOSS
    )
    assert found.report is not None and found.report.passed


@pytest.mark.parametrize("precision", ["int8", "int4", "fp16"])
def test_other_precisions_choose_the_same_experts(
    mixture: tuple[Path, Any], tmp_path: Path, precision: str
) -> None:
    folder, theirs = mixture
    target = "portable" if precision == "fp16" else "cpu"
    # Random weights have tokens between two experts, for whom any rounding changes much.
    how: dict[str, Any] = {"precision": [precision], "target": [target], "verify": False, "quantizer": "rtn"}
    export(folder / "checkpoint", tmp_path / "bundle", **how)
    with TextGenerator.load(tmp_path / "bundle", precision=precision) as model:
        ids = model.encode_prompt(TEXTS[1])
        found = np.concatenate(list(model.decoder.start(1, len(ids)).extend(ids)))
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0].numpy()
    # The share of the logits' variance that is lost: other experts would lose about all of it twice over.
    lost = np.square(found - wanted).mean() / wanted.var()
    assert lost < {"fp16": 1e-3, "int8": 0.1, "int4": 0.7}[precision]


def exchange_experts(graph: ir.Graph) -> None:
    """Exchange what two experts multiply first."""
    names = [
        next(name for name in graph.initializers if f"layers.1.mlp.experts.{number}.gate_proj" in name)
        for number in (0, 1)
    ]
    first, second = (graph.initializers[name] for name in names)
    first.const_value, second.const_value = second.const_value, first.const_value


def leave_shares_unscaled(graph: ir.Graph) -> None:
    """Leave out the division by the sum of a token's shares in a layer."""
    divide = [node for node in graph if node.op_type == "Div" and reads(node, 1, "ReduceSum")][-1]
    unscaled = divide.inputs[0]
    assert unscaled is not None
    ir.convenience.replace_all_uses_with(divide.outputs[0], unscaled)


def reads(node: ir.Node, place: int, operator: str) -> bool:
    """Tell whether an input of a node is the result of an operator."""
    value = node.inputs[place]
    producer = None if value is None else value.producer()
    return producer is not None and producer.op_type == operator


def choose_the_last(graph: ir.Graph) -> None:
    """Let a layer's tokens choose the experts with the smallest shares."""
    choice = [node for node in graph if node.op_type == "TopK" and reads(node, 0, "Softmax")][-1]
    choice.attributes["largest"] = ir.AttrInt64("largest", 0)


FAULTS: dict[str, Callable[[ir.Graph], None]] = {
    "experts exchanged": exchange_experts,
    "shares unscaled": leave_shares_unscaled,
    "smallest shares": choose_the_last,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_and_named(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    collect = exporting.collect_graphs

    def collect_wrong(*given: Any) -> Any:
        graphs = collect(*given)
        FAULTS[fault](graphs["decoder.ort"].graph)
        return graphs

    monkeypatch.setattr(exporting, "collect_graphs", collect_wrong)
    with pytest.raises(VerificationError, match=r"layers\.1\.mlp"):
        export(mixtral, tmp_path / "bundle", precision=["fp32"], target=["cpu"], verify="quick")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts_per_tok": 5}, "experts_per_token=5 is more than num_experts=4"),
        ({"num_local_experts": 5}, r"missing: layers.0.mlp.experts.4.gate_proj.weight"),
        ({"model_type": "qwen2_moe"}, r"qwen2_moe is a mixture of experts \(num_local_experts=4\)"),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0, which is not known for mixtral"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    mixtral: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for path in mixtral.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    edit_json(folder / "config.json", **settings)
    with pytest.raises(CheckpointError, match=message):
        export(folder, tmp_path / "bundle", precision=["fp32"], target=["cpu"])


def test_a_missing_expert_is_named(mixtral: Path, tmp_path: Path) -> None:
    for path in mixtral.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing: layers\.1\.mlp\.experts\.2\.up_proj\.weight"):
        export(tmp_path, tmp_path / "bundle", precision=["fp32"], target=["cpu"])
