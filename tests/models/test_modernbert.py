"""ModernBERT against transformers: its heads, its windows, and the settings of its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from planforge.models import ModernBert
from planforge.models.checkpoint import load_model

from ..helpers.models import edit_json

LIMIT = 1e-5
FAR = 1e-2  # what must differ differs by more
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "local_attention": 8,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "initializer_range": 0.3,
    "num_labels": 3,
}
HEADS = {
    "MaskedLM": "masked_lm",
    "SequenceClassification": "sequence_classification",
    "TokenClassification": "token_classification",
    "QuestionAnswering": "question_answering",
}
BIASES = {
    name: True for name in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
}  # the published have none
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("ModernBertModel", {}),
    "biases": ("ModernBertModel", BIASES),
    "words": ("ModernBertForMaskedLM", {}),
    "words-untied": ("ModernBertForMaskedLM", {"tie_word_embeddings": False, "decoder_bias": False}),
    "texts-cls": ("ModernBertForSequenceClassification", {}),
    "texts-mean": ("ModernBertForSequenceClassification", {"classifier_pooling": "mean"}),
    "tokens": ("ModernBertForTokenClassification", BIASES | {"classifier_activation": "silu"}),
    "answers": ("ModernBertForQuestionAnswering", {"num_labels": 2}),
    "layers": ("ModernBertModel", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
}


def save_tiny(folder: Path, name: str, **settings: Any) -> Any:
    """Write a random ModernBERT, and return it."""
    transformers.set_seed(0)
    model: Any = getattr(transformers, name)(transformers.ModernBertConfig(**SIZES | settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def make_batch() -> tuple[Tensor, Tensor]:
    """Return ids (2, 31), longer than three windows, and a mask by which the second row is shorter."""
    ids = torch.randint(4, 96, (2, 31), generator=torch.Generator().manual_seed(1))
    ids[1, 22:] = SIZES["pad_token_id"]
    return ids, (ids != SIZES["pad_token_id"]).long()


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_equal_transformers(kind: str, tmp_path: Path) -> None:
    name, settings = KINDS[kind]
    reference = save_tiny(tmp_path, name, **settings)
    ours = load_model(tmp_path)
    assert isinstance(ours, ModernBert)
    ids, mask = make_batch()
    with torch.no_grad():
        want = reference(ids, attention_mask=mask)
        hidden = getattr(reference, "model", reference)(ids, attention_mask=mask).last_hidden_state
        got = ours(ids, mask)
    real = mask == 1
    torch.testing.assert_close(got["last_hidden_state"][real], hidden[real], rtol=0, atol=LIMIT)
    ending = name.partition("For")[2]
    assert ours.config.heads == ((HEADS[ending],) if ending else ())
    if not ending:
        return
    wanted = want.get("logits")
    if ending == "QuestionAnswering":
        wanted = torch.stack([want.start_logits, want.end_logits], dim=-1)
    chosen = real if wanted.shape[:2] == ids.shape else slice(None)
    torch.testing.assert_close(got[HEADS[ending]][chosen], wanted[chosen], rtol=0, atol=LIMIT)


def test_a_local_layer_sees_its_window_alone(tmp_path: Path) -> None:
    """Half of `local_attention` on either side: a change further off has no effect on a local layer."""
    save_tiny(tmp_path, "ModernBertModel", num_hidden_layers=1, layer_types=["sliding_attention"])
    ours = load_model(tmp_path)
    ids, _ = make_batch()
    changed = ids.clone()
    changed[0, 10] = ids[0, 10] % 90 + 5
    with torch.no_grad():
        apart = (ours(ids)["last_hidden_state"] - ours(changed)["last_hidden_state"])[0].abs().amax(1)
    seen = torch.arange(31).sub(10).abs() <= SIZES["local_attention"] // 2
    assert bool((apart[seen] > 1e-4).all())
    assert float(apart[~seen].max()) == 0


def test_older_names_of_settings(tmp_path: Path) -> None:
    """As answerdotai/ModernBERT-base has them, beside settings that no code reads."""
    save_tiny(tmp_path, "ModernBertModel", num_hidden_layers=5)
    edit_json(
        tmp_path / "config.json",
        layer_types=None,
        rope_parameters=None,
        global_attn_every_n_layers=2,
        global_rope_theta=500.0,
        local_rope_theta=50.0,
        position_embedding_type="absolute",
        layer_norm_eps=1e-5,
        repad_logits_with_grad=False,
        reference_compile=True,
        gradient_checkpointing=False,
    )
    reference = transformers.ModernBertModel.from_pretrained(tmp_path).eval()
    ours = load_model(tmp_path)
    assert isinstance(ours, ModernBert)
    assert ours.config.rotary.rope_theta == 500 and ours.config.local_rotary.rope_theta == 50
    ids, mask = make_batch()
    with torch.no_grad():
        want = reference(ids, attention_mask=mask).last_hidden_state
        got = ours(ids, mask)["last_hidden_state"]
    torch.testing.assert_close(got[mask == 1], want[mask == 1], rtol=0, atol=LIMIT)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"moon_phase": 3}, "config.json sets moon_phase=3, which is not known for modernbert"),
        ({"classifier_pooling": "max"}, "classifier_pooling='max' is not cls or mean"),
        ({"layer_types": None, "num_hidden_layers": 2**31}, "is more than the supported 2000 layers"),
        ({"layer_types": ["full_attention"]}, "for each of 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"architectures": ["ModernBertForTokenClassification"]}, "no token_classification head"),
        ({"architectures": ["ModernBertForMultipleChoice"]}, "no sequence_classification head"),
    ],
)
def test_what_is_not_known_is_named(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "ModernBertModel")
    edit_json(tmp_path / "config.json", **settings)
    with pytest.raises(ValueError, match=said):
        load_model(tmp_path)
