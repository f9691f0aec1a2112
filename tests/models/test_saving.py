"""What `save_model` writes is read by transformers, no name missing, and by `load_model` bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from planforge.models import Bert, BertConfig, Llama, LlamaConfig, load_model, save_model
from planforge.models.llama_saving import SAVED_TYPES
from planforge.models.rotary import Rotary

from ..helpers.bert import OUTPUTS
from ..helpers.llamas import LLAMAS, tiny_llama
from ..helpers.models import tiny_bert

LIMIT = 1e-5  # of logits, where weights are joined, or norms have an offset
ENCODERS = [
    *OUTPUTS,
    *(f"XLMRoberta{name.removeprefix('Bert')}" for name in OUTPUTS if name.startswith("Bert")),
]
LACKING = ("XLMRobertaForPreTraining", "XLMRobertaForNextSentencePrediction")  # no such classes
SMALL = BertConfig(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=16,
)
SMALL_LLAMA = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_size": 24}


def read_back(folder: Path, reference: Any) -> Any:
    """The model that transformers reads of a folder; every weight is there, and no other."""
    report: Any
    again, report = type(reference).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return again.eval()


def assert_same_outputs(one: Any, two: Any, limit: float) -> None:
    ids = torch.arange(40).reshape(2, 20) + 5
    with torch.inference_mode():
        for got, wanted in zip(one(ids).to_tuple(), two(ids).to_tuple(), strict=True):
            if isinstance(got, torch.Tensor):
                torch.testing.assert_close(got, wanted, rtol=0, atol=limit)


def assert_same_weights(one: nn.Module, two: nn.Module) -> None:
    weights = two.state_dict()
    assert one.state_dict().keys() == weights.keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("architecture", [name for name in ENCODERS if name not in LACKING])
def test_transformers_reads_a_saved_encoder(tmp_path: Path, architecture: str) -> None:
    is_roberta = architecture.startswith("XLM")
    reference = tiny_bert(tmp_path / "before", architecture, **({"pad_token_id": 1} if is_roberta else {}))
    model = load_model(tmp_path / "before")
    model_type = "roberta" if is_roberta else None
    save_model(model, tmp_path / "after", model_type)  # type: ignore[arg-type]
    config = json.loads((tmp_path / "after/config.json").read_text())
    assert config["architectures"] == [architecture.removeprefix("XLM").replace("RoBERTa", "Roberta")]
    if is_roberta:
        reference_class = getattr(transformers, config["architectures"][0])
        again: Any = reference_class.from_pretrained(tmp_path / "after").eval()
    else:
        again = read_back(tmp_path / "after", reference)
    assert_same_outputs(again, reference, LIMIT if is_roberta else 0)
    assert_same_weights(load_model(tmp_path / "after"), model)


@pytest.mark.parametrize("kind", ["Bert", "DistilBert", "XLMRoberta"])
def test_transformers_reads_what_rates_choices(tmp_path: Path, kind: str) -> None:
    is_roberta = kind == "XLMRoberta"
    options = {"pad_token_id": 1} if is_roberta else {}
    reference: Any = tiny_bert(tmp_path / "before", f"{kind}ForMultipleChoice", **options)
    model_type = "roberta" if is_roberta else None
    save_model(load_model(tmp_path / "before"), tmp_path / "after", model_type)  # type: ignore[arg-type]
    again: Any = transformers.AutoModelForMultipleChoice.from_pretrained(tmp_path / "after").eval()
    ids = torch.arange(40).reshape(1, 2, 20) + 5
    with torch.inference_mode():
        torch.testing.assert_close(again(ids).logits, reference(ids).logits, rtol=0, atol=LIMIT)


def test_an_untied_head_keeps_its_weight_and_both_biases(tmp_path: Path) -> None:
    reference = tiny_bert(tmp_path / "before", "BertForMaskedLM", tie_word_embeddings=False)
    save_model(load_model(tmp_path / "before"), tmp_path / "after")  # type: ignore[arg-type]
    assert_same_outputs(read_back(tmp_path / "after", reference), reference, 0)


@pytest.mark.parametrize("name", [name for name in LLAMAS if not name.startswith("phi")])
def test_transformers_reads_a_saved_llama(tmp_path: Path, name: str) -> None:
    reference = tiny_llama(tmp_path / "before", name)
    model = load_model(tmp_path / "before")
    model_type = reference.config.model_type
    save_model(model, tmp_path / "after", model_type, settings={"eos_token_id": 7})  # type: ignore[arg-type]
    again = read_back(tmp_path / "after", reference)
    assert again.config.eos_token_id == 7
    gemma = model_type.startswith("gemma")  # whose norms are published less 1
    assert_same_outputs(again, reference, LIMIT if gemma else 0)
    if not gemma:
        assert_same_weights(load_model(tmp_path / "after"), model)


@pytest.mark.parametrize(
    ("change", "model_type"),
    [
        ({}, "llama"),
        ({"qkv_bias": True, "output_bias": True}, "llama"),
        ({"rotary": Rotary(rope_type="linear", factor=2.0)}, "llama"),
        ({"window": 8, "layer_types": ("sliding_attention",) * 2}, "mistral"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qk_norm": "head"}, "qwen3"),
        ({"norms": "after", "qk_norm": "projection"}, "olmo2"),
        ({**EXPERTS, "expert_size": 48}, "mixtral"),
        ({**EXPERTS, "qk_norm": "head", "dense_layers": (0,)}, "qwen3_moe"),
        ({**EXPERTS, "expert_size": 48, "qk_norm": "projection", "normalizes_experts": False}, "olmoe"),
    ],
)
def test_a_model_of_ones_own_is_saved_as_the_first_type_that_fits(
    tmp_path: Path, change: dict[str, Any], model_type: str
) -> None:
    model = Llama(replace(SMALL_LLAMA, **change)).eval()
    save_model(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == model_type
    assert_same_weights(load_model(tmp_path), model)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(20).reshape(2, 10)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids)[0], reference(ids).logits, rtol=0, atol=LIMIT)


def refusal(tmp_path: Path, model: Any, *how: Any, **more: Any) -> str:
    with pytest.raises(ValueError) as caught:
        save_model(model, tmp_path / "out", *how, **more)
    assert not (tmp_path / "out").exists()
    return str(caught.value)


def test_a_model_that_no_type_has_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = Llama(replace(SMALL_LLAMA, logits_softcap=3.0))
    assert refusal(tmp_path, model, "llama") == (
        "this Llama cannot be saved as llama: logits_softcap would be read as None, not 3.0. Train such a"
        " model with transformers' Trainer, and export the folder that it writes"
    )
    assert "cannot be saved as" in refusal(tmp_path, model)
    assert refusal(tmp_path, model, "phi3") == f"model_type='phi3' is not one of {', '.join(SAVED_TYPES)}"
    segments = Bert(replace(SMALL, type_vocab_size=0))
    assert "type_vocab_size=0 must be at least 1" in refusal(tmp_path, segments, "bert")
    heads = Bert(replace(SMALL, heads=("masked_lm", "token_classification")))
    assert "transformers has no Bert with the heads" in refusal(tmp_path, heads)
    assert "a Linear cannot be saved; what can is GPT2" in refusal(tmp_path, nn.Linear(2, 2))


def test_labels_and_settings_belong_to_the_model(tmp_path: Path) -> None:
    model = Bert(replace(SMALL, heads=("sequence_classification",), pooler="tanh", num_labels=3))
    assert refusal(tmp_path, model, labels=["no", "yes"]) == "got 2 labels; the model has 3 classes"
    assert refusal(tmp_path, Bert(SMALL), labels=["no"]) == "got 1 labels; the model has 0 classes"
    assert refusal(tmp_path, model, settings={"vocab_size": 5}) == (
        "settings has vocab_size=5, but the model has vocab_size=96"
    )
    save_model(model, tmp_path, labels=["no", "yes", "perhaps"], settings={"pad_token_id": 3})
    config: Any = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.id2label == {0: "no", 1: "yes", 2: "perhaps"} and config.label2id["perhaps"] == 2
    assert config.pad_token_id == 3
