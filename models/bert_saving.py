"""Publishes BERT, DistilBERT and RoBERTa: config.json and weights as `bert_names` reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .bert import Bert, BertConfig
from .bert_names import ARCHITECTURE_HEADS, BERT, CHOICE, CLASSIFIERS, DISTILBERT, ROBERTA, STAND_INS

CLASS_NAMES = {"bert": "Bert", "distilbert": "DistilBert", "roberta": "Roberta"}
TABLES = {"bert": BERT, "distilbert": DISTILBERT, "roberta": ROBERTA}
SETTINGS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "hidden_act", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
DISTILBERT_SETTINGS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
HEAD_NAMES = ("cls.", "classifier", "qa_outputs", "lm_head", "vocab_", "pre_classifier")  # without a prefix
ROBERTA_PADDING = 1  # the padding token of all published ones; positions begin behind it
MASKED_BIAS = "heads.masked_lm.decoder.bias"


def describe_bert(model: Bert, model_type: str) -> dict[str, Any]:
    """Return config.json's settings.

    Raises:
        ValueError: transformers has no class with these heads, or none with or without segments.
    """
    config = model.config
    if model_type == "bert" and not config.type_vocab_size:
        raise ValueError("type_vocab_size=0 must be at least 1; distilbert and roberta have no segments")
    values = {name: getattr(config, name) for name in SETTINGS}
    if model_type == "distilbert":
        values = {DISTILBERT_SETTINGS.get(name, name): value for name, value in values.items()}
    else:
        values |= {"type_vocab_size": config.type_vocab_size, "layer_norm_eps": config.layer_norm_eps}
    if model_type == "roberta":
        values["max_position_embeddings"] += ROBERTA_PADDING + 1
        values |= {"type_vocab_size": 1, "pad_token_id": ROBERTA_PADDING}
    return {"architectures": [CLASS_NAMES[model_type] + find_ending(config, model_type)], **values}


def find_ending(config: BertConfig, model_type: str) -> str:
    """Return how the name of transformers' class ends, by the heads."""
    heads = config.heads
    if not heads:
        return "Model"
    if config.chooses:
        return CHOICE
    if model_type == "bert" and set(heads) == {"masked_lm", "next_sentence"}:
        return "ForPreTraining"
    endings = [ending for ending, head in ARCHITECTURE_HEADS.items() if heads == (head,)]
    if not endings or (model_type != "bert" and "next_sentence" in heads):
        raise ValueError(f"transformers has no {CLASS_NAMES[model_type]} with the heads {list(heads)}")
    return endings[0]


def publish_bert(model: Bert, model_type: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by their published names and in their published form."""
    heads = model.config.heads
    table = {
        ours: published for published, ours in list_rows(model_type, heads, model.config.chooses).items()
    }
    rows = [(re.compile(match_name(ours)), name_group(published)) for ours, published in table.items()]
    rows.sort(key=lambda row: r"\2" in row[1])  # attention.output is no projection of attention.(\w+)
    prefix = f"{model_type}." if heads else ""

    def translate(name: str) -> str:
        stem, _, ending = name.rpartition(".")
        for pattern, published in rows:
            if match := pattern.fullmatch(stem):
                found = f"{match.expand(published)}.{ending}"
                return found if found.startswith(HEAD_NAMES) else prefix + found
        raise AssertionError(f"{name} has no published name")

    found = {translate(name): tensor for name, tensor in weights.items()}
    stand_in = next(iter(STAND_INS))
    if MASKED_BIAS in weights and stand_in.rpartition(".")[0] in table:  # published beside the decoder's
        found[translate(stand_in)] = weights[MASKED_BIAS].clone()
        if model.config.tie_word_embeddings:
            del found[translate(MASKED_BIAS)]
    if model_type == "roberta":
        unfold_segment(found, f"{prefix}embeddings.")
    return found


def list_rows(model_type: str, heads: tuple[str, ...], chooses: bool) -> dict[str, str]:
    """Return the published names and ours that a model with these heads has."""
    rows = dict(TABLES[model_type])
    classifiers = [head for head in CLASSIFIERS.values() if head in heads]
    if model_type == "roberta" and "sequence_classification" in heads and not chooses:
        del rows["pooler.dense"]  # in this class it is the classifier's
        return rows
    rows.pop("classifier.dense", None)
    rows.pop("classifier.out_proj", None)
    return {**rows, "classifier": f"heads.{classifiers[0]}"} if classifiers else rows


def match_name(ours: str) -> str:
    return ours.replace(".", r"\.").replace(r"\1", r"(\d+)").replace(r"\2", r"(\w+)")


def name_group(published: str) -> str:
    return published.replace(r"(\d+)", r"\1").replace(r"(\w+)", r"\2")


def unfold_segment(published: dict[str, Tensor], before: str) -> None:
    """Add RoBERTa's one segment and the positions that no text uses, all 0: the reverse of `fold_segment`."""
    positions = published[f"{before}position_embeddings.weight"]
    unused = positions.new_zeros(ROBERTA_PADDING + 1, positions.shape[1])
    published[f"{before}position_embeddings.weight"] = torch.cat([unused, positions])
    published[f"{before}token_type_embeddings.weight"] = unused[:1].clone()
