"""Reference BERTs beside those of transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor

from planforge.models import Bert, PaddedAttention

LIMIT = 1e-4


FAR = 100 * LIMIT  # what must differ in the reference differs by more than this


# Which of transformers' outputs each of ours is; two are put side by side.
OUTPUTS: dict[str, dict[str, str]] = {
    "BertModel": {"pooler_output": "pooler_output"},
    "BertForMaskedLM": {"masked_lm": "logits"},
    "BertForPreTraining": {"masked_lm": "prediction_logits", "next_sentence": "seq_relationship_logits"},
    "BertForNextSentencePrediction": {"next_sentence": "logits"},
    "BertForSequenceClassification": {"sequence_classification": "logits"},
    "BertForTokenClassification": {"token_classification": "logits"},
    "BertForQuestionAnswering": {"question_answering": "start_logits end_logits"},
    "DistilBertModel": {},
    "DistilBertForMaskedLM": {"masked_lm": "logits"},
    "DistilBertForSequenceClassification": {"sequence_classification": "logits"},
    "DistilBertForTokenClassification": {"token_classification": "logits"},
    "DistilBertForQuestionAnswering": {"question_answering": "start_logits end_logits"},
}


PER_TOKEN = {"last_hidden_state", "masked_lm", "token_classification", "question_answering"}


each_architecture = pytest.mark.parametrize("architecture", OUTPUTS)


def batch(reference: transformers.PreTrainedModel, *shape: int) -> dict[str, Tensor]:
    """Random ids and, for BERT, random segments; nothing is padded."""
    generator = torch.Generator().manual_seed(1)
    inputs = {"input_ids": torch.randint(reference.config.vocab_size, shape, generator=generator)}
    if segments := getattr(reference.config, "type_vocab_size", 0):
        inputs["token_type_ids"] = torch.randint(segments, shape, generator=generator)
    return inputs


def expected(reference: transformers.PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' outputs under our names, and all hidden states (layers + 1, B, T, E)."""
    with torch.inference_mode():
        out = reference(**inputs, output_hidden_states=True)
    wanted = {"hidden_states": torch.stack(out.hidden_states), "last_hidden_state": out.hidden_states[-1]}
    for ours, theirs in OUTPUTS[type(reference).__name__].items():
        tensors = [getattr(out, name) for name in theirs.split()]
        wanted[ours] = torch.stack(tensors, dim=-1) if len(tensors) > 1 else tensors[0]
    return wanted


def assert_outputs(ours: Bert, inputs: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Every output of ours is there and near; at padded positions anything may be."""
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    got = ours(**inputs)
    assert set(got) - {"pooler_output"} == set(wanted) - {"hidden_states", "pooler_output"}
    attention = PaddedAttention(mask)
    states = torch.stack(ours.hidden_states(inputs["input_ids"], inputs.get("token_type_ids"), attention))
    torch.testing.assert_close(states[:, mask], wanted["hidden_states"][:, mask], rtol=0, atol=LIMIT)
    for name in set(wanted) - {"hidden_states"}:
        pair = got[name], wanted[name]
        if name in PER_TOKEN:
            pair = got[name][mask], wanted[name][mask]
        torch.testing.assert_close(*pair, rtol=0, atol=LIMIT)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
