"""RoBERTa, XLM-R and CamemBERT against transformers, with the heads that they are published with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from planforge.models import Bert
from planforge.models.checkpoint import load_model

LIMIT = 1e-5
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 34,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "num_labels": 3,
}
HEADS = {
    "": "pooler_output",
    "MaskedLM": "masked_lm",
    "SequenceClassification": "sequence_classification",
    "TokenClassification": "token_classification",
    "QuestionAnswering": "question_answering",
}
CLASSES = [
    "RobertaModel",
    "RobertaForMaskedLM",
    "RobertaForSequenceClassification",
    "RobertaForTokenClassification",
    "RobertaForQuestionAnswering",
    "XLMRobertaForMaskedLM",
    "XLMRobertaForSequenceClassification",
    "CamembertForTokenClassification",
]


@pytest.mark.parametrize("name", CLASSES)
def test_outputs_equal_transformers(name: str, tmp_path: Path) -> None:
    transformers.set_seed(0)
    kind = name.partition("For")[0].removesuffix("Model")
    sizes = {**SIZES, "num_labels": 2} if name.endswith("QuestionAnswering") else SIZES
    reference: Any = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**sizes)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    reference.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    assert isinstance(ours, Bert)
    assert ours.config.max_position_embeddings == 32
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    ids[1, 6:] = 1
    mask = (ids != 1).long()
    with torch.no_grad():
        want = reference(ids, attention_mask=mask, output_hidden_states=True)
        got = ours(ids, mask)
    torch.testing.assert_close(
        got["last_hidden_state"][mask == 1], want.hidden_states[-1][mask == 1], rtol=0, atol=LIMIT
    )
    head = HEADS[name.partition("For")[2]]
    wanted = want.pooler_output if head == "pooler_output" else want.get("logits")
    if head == "question_answering":
        wanted = torch.stack([want.start_logits, want.end_logits], dim=-1)
    chosen = mask == 1 if got[head].shape[:2] == ids.shape else slice(None)
    torch.testing.assert_close(got[head][chosen], wanted[chosen], rtol=0, atol=LIMIT)


def test_positions_begin_behind_any_padding_token(tmp_path: Path) -> None:
    reference = transformers.RobertaModel(transformers.RobertaConfig(**SIZES, pad_token_id=5)).eval()
    reference.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    ids = torch.tensor([[7, 8, 9]])
    with torch.no_grad():
        want = reference(ids).last_hidden_state
        got = ours(ids)["last_hidden_state"]
    torch.testing.assert_close(got, want, rtol=0, atol=LIMIT)
