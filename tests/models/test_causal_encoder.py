"""Decoders with heads: GPT-2, GPT-1, GPT-Neo and the Llama family, beside transformers' classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from planforge.models import CausalEncoder, save_model
from planforge.models.checkpoint import load_model

from ..helpers.models import TINY, edit_json, edit_weights

LIMIT = 1e-5
PAD = 95
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEO: dict[str, Any] = {
    **{"vocab_size": 96, "max_position_embeddings": 64, "hidden_size": 32, "num_layers": 4, "num_heads": 4},
    **{"attention_types": [[["global", "local"], 2]], "window_size": 4, "initializer_range": 0.2},
    **{"bos_token_id": 0, "eos_token_id": 0},
}
# By how the names of their classes begin.
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2": TINY,
    "OpenAIGPT": TINY,
    "GPTNeo": NEO,
    "Llama": SIZES | {"num_key_value_heads": 2},
    "Qwen3": SIZES | {"num_key_value_heads": 2, "head_dim": 16},
    "Qwen2": SIZES | {"num_key_value_heads": 2},
    "Mistral": SIZES | {"num_key_value_heads": 2, "sliding_window": 4},
    "Ministral": SIZES | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
    "Phi3": SIZES,
    "Gemma3Text": SIZES | {"head_dim": 8, "sliding_window": 4},
}
HEADS = {
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering",
    "DoubleHeadsModel": "sequence_classification",
}


def list_classes() -> list[tuple[str, str]]:
    """Every class of these families that transformers has, one of the Llama family's by each head."""
    found = [(name, ending) for name in CONFIGS for ending in HEADS]
    return [(name, ending) for name, ending in found if hasattr(transformers, f"{name}{ending}")]


def save_random(folder: Path, name: str, ending: str, **settings: Any) -> Any:
    """Write a random checkpoint of a class; return transformers' model."""
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name] | {"num_labels": 3} | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}{ending}")(config).eval()
    model.save_pretrained(folder)
    return model


def load(folder: Path) -> CausalEncoder:
    model = load_model(folder)
    assert isinstance(model, CausalEncoder)
    return model


def make_batch() -> tuple[Tensor, Tensor]:
    """Three texts of 20, 12 and 19 tokens, of which the last ends with the token that pads."""
    ids = torch.randint(1, PAD, (3, 20), generator=torch.Generator().manual_seed(1))
    ids[1, 12:] = PAD
    ids[2, 18:] = PAD
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    mask[2, 19] = 0
    return ids, mask


@torch.no_grad()
def compute_wanted(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """transformers' logits, of a double-heads model those at each row's last token."""
    if hasattr(model, "multiple_choice_head"):
        rows = model(ids, attention_mask=mask, mc_token_ids=mask.sum(1) - 1)
        return rows.mc_logits[:, None]  # type: ignore[no-any-return]
    found = model(ids, attention_mask=mask)
    if "start_logits" in found:
        return torch.stack([found.start_logits, found.end_logits], dim=-1)
    return found.logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "ending"), list_classes())
def test_heads_give_what_transformers_gives(name: str, ending: str, tmp_path: Path) -> None:
    reference = save_random(tmp_path, name, ending, pad_token_id=PAD)
    ours = load(tmp_path)
    assert ours.config.heads == (HEADS[ending],)
    ids, mask = make_batch()
    want = compute_wanted(reference, ids, mask)
    with torch.no_grad():
        got = ours(ids, mask)[HEADS[ending]]
    if want.shape[:2] == mask.shape:
        got = got[mask == 1]
        want = want[mask == 1]
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, rtol=0, atol=LIMIT)


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_a_classifier_reads_the_last_token_that_is_no_padding_by_its_id(name: str, tmp_path: Path) -> None:
    """The token before a text's own closing one, if that pads too; by the attention mask it would be that."""
    save_random(tmp_path, name, "ForSequenceClassification", pad_token_id=PAD)
    ours = load(tmp_path)
    text = torch.tensor([[5, 9, 17, 30]])
    closed = torch.tensor([[5, 9, 17, 30, PAD]])
    only_padding = torch.full((1, 3), PAD)
    with torch.no_grad():
        want = ours(text)["sequence_classification"]
        torch.testing.assert_close(ours(closed)["sequence_classification"], want, rtol=0, atol=LIMIT)
        first = ours(only_padding[:, :1])["sequence_classification"]
        torch.testing.assert_close(ours(only_padding)["sequence_classification"], first, rtol=0, atol=LIMIT)
    edit_json(tmp_path / "config.json", pad_token_id=None)
    with torch.no_grad():
        by_mask = load(tmp_path)(closed)["sequence_classification"]
    assert (by_mask - want).abs().max() > 1e-2


def test_without_a_token_that_pads_each_row_is_as_transformers_gives_it_alone(tmp_path: Path) -> None:
    """transformers takes no batch then."""
    reference = save_random(tmp_path, "GPT2", "ForSequenceClassification", pad_token_id=None)
    ids, mask = make_batch()
    with torch.no_grad():
        got = load(tmp_path)(ids, mask)["sequence_classification"]
        for row, length in enumerate(mask.sum(1).tolist()):
            want = reference(ids[row : row + 1, :length]).logits[0]
            torch.testing.assert_close(got[row], want, rtol=0, atol=LIMIT)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"summary_type": "mean"}, "config.json sets summary_type='mean'; of a GPT2DoubleHeadsModel only"),
        (
            {"summary_activation": "tanh"},
            "summary_activation='tanh'; .* save the model without it, as a GPT2LM",
        ),
        ({"summary_use_proj": False}, "summary_use_proj=False"),
        ({"summary_proj_to_labels": False}, "summary_proj_to_labels=False"),
    ],
)
def test_other_summaries_are_refused_with_the_way_out(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save_random(tmp_path, "GPT2", "DoubleHeadsModel")
    edit_json(tmp_path / "config.json", **settings)
    with pytest.raises(ValueError, match=said):
        load_model(tmp_path)


def test_a_head_that_config_json_names_must_be_there(tmp_path: Path) -> None:
    save_random(tmp_path, "Llama", "ForSequenceClassification")
    edit_weights(tmp_path, **{"score.weight": None})
    with pytest.raises(
        ValueError, match="names LlamaForSequenceClassification, but the weights have no sequ"
    ):
        load_model(tmp_path)


SAVED = [(name, ending) for name, ending in list_classes() if name not in ("GPTNeo", "Phi3", "Gemma3Text")]


@pytest.mark.parametrize(("name", "ending"), [row for row in SAVED if row[1] != "DoubleHeadsModel"])
def test_transformers_reads_a_saved_decoder_with_a_head(name: str, ending: str, tmp_path: Path) -> None:
    reference = save_random(tmp_path / "before", name, ending, pad_token_id=PAD)
    model = load(tmp_path / "before")
    labels = [] if ending == "ForQuestionAnswering" else ["red", "green", "blue"]
    save_model(model, tmp_path / "after", reference.config.model_type, labels)
    again, report = type(reference).from_pretrained(tmp_path / "after", output_loading_info=True)
    assert not any(report.values()), report
    ids, mask = make_batch()
    want = compute_wanted(reference, ids, mask)
    torch.testing.assert_close(compute_wanted(again.eval(), ids, mask), want, rtol=0, atol=LIMIT)
    assert not labels or again.config.id2label[1] == "green"
    assert load(tmp_path / "after").config == model.config


@pytest.mark.parametrize(
    ("name", "ending", "message"),
    [
        ("GPT2", "DoubleHeadsModel", "it needs one head, .* not one that rates choices"),
        (
            "GPTNeo",
            "ForSequenceClassification",
            "saved as gpt2: qkv_bias would be read as True, not False; or as openai-gpt: .*"
            r"\. Train such a model with transformers' Trainer, and export the folder that it writes$",
        ),
    ],
)
def test_a_head_that_cannot_be_saved_is_refused(name: str, ending: str, message: str, tmp_path: Path) -> None:
    save_random(tmp_path / "before", name, ending)
    with pytest.raises(ValueError, match=message):
        save_model(load(tmp_path / "before"), tmp_path / "after")
    assert not (tmp_path / "after").exists()
