"""Maps the published weights of BERT, DistilBERT and RoBERTa to ours, and reads settings from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .encoder import HEADS

Rename = Callable[[str], str | None]  # a published name -> ours; None: not a weight

# What a published name begins with -> what ours does; the rest (".weight", ".bias") stays.
EMBEDDINGS = {
    "embeddings.word_embeddings": "embeddings.words",
    "embeddings.position_embeddings": "embeddings.positions",
    "embeddings.token_type_embeddings": "embeddings.segments",
    "embeddings.LayerNorm": "embeddings.norm",
    "qa_outputs": "heads.question_answering",
}
BERT = EMBEDDINGS | {
    r"encoder.layer.(\d+).attention.self.(\w+)": r"layers.\1.attention.\2",
    r"encoder.layer.(\d+).attention.output.dense": r"layers.\1.attention.output",
    r"encoder.layer.(\d+).attention.output.LayerNorm": r"layers.\1.attention_norm",
    r"encoder.layer.(\d+).intermediate.dense": r"layers.\1.intermediate",
    r"encoder.layer.(\d+).output.dense": r"layers.\1.output",
    r"encoder.layer.(\d+).output.LayerNorm": r"layers.\1.output_norm",
    "pooler.dense": "pooler.dense",
    "cls.predictions.transform.dense": "heads.masked_lm.dense",
    "cls.predictions.transform.LayerNorm": "heads.masked_lm.norm",
    "cls.predictions.decoder": "heads.masked_lm.decoder",
    "cls.predictions": "heads.masked_lm",  # the decoder's bias, see STAND_INS
    "cls.seq_relationship": "heads.next_sentence",
}
DISTILBERT = EMBEDDINGS | {
    r"transformer.layer.(\d+).attention.q_lin": r"layers.\1.attention.query",
    r"transformer.layer.(\d+).attention.k_lin": r"layers.\1.attention.key",
    r"transformer.layer.(\d+).attention.v_lin": r"layers.\1.attention.value",
    r"transformer.layer.(\d+).attention.out_lin": r"layers.\1.attention.output",
    r"transformer.layer.(\d+).sa_layer_norm": r"layers.\1.attention_norm",
    r"transformer.layer.(\d+).ffn.lin1": r"layers.\1.intermediate",
    r"transformer.layer.(\d+).ffn.lin2": r"layers.\1.output",
    r"transformer.layer.(\d+).output_layer_norm": r"layers.\1.output_norm",
    "pre_classifier": "pooler.dense",
    "vocab_transform": "heads.masked_lm.dense",
    "vocab_layer_norm": "heads.masked_lm.norm",
    "vocab_projector": "heads.masked_lm.decoder",
}
ROBERTA = {published: ours for published, ours in BERT.items() if not published.startswith("cls.")} | {
    "classifier.dense": "pooler.dense",
    "classifier.out_proj": "heads.sequence_classification",
    "lm_head.dense": "heads.masked_lm.dense",
    "lm_head.layer_norm": "heads.masked_lm.norm",
    "lm_head.decoder": "heads.masked_lm.decoder",
    "lm_head": "heads.masked_lm",
}
# Most files have the first alone. Where both are, and nothing is tied, transformers computes with the second.
STAND_INS = {"heads.masked_lm.bias": "heads.masked_lm.decoder.bias"}
BUFFERS = {"embeddings.position_ids", "embeddings.token_type_ids"}
CHOICE = "ForMultipleChoice"
CLASSIFIERS = {
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    CHOICE: "sequence_classification",  # of a single label: the logit of one of the choices
}
ARCHITECTURE_HEADS = CLASSIFIERS | {
    "ForMaskedLM": "masked_lm",
    "ForNextSentencePrediction": "next_sentence",
    "ForPreTraining": "masked_lm",
    "ForQuestionAnswering": "question_answering",
}
OLD_ENDINGS = {"gamma": "weight", "beta": "bias"}  # of TensorFlow's LayerNorm


def rename_by(table: Mapping[str, str], config_json: Mapping[str, Any]) -> Rename:
    """Return the renaming of one family; config.json tells the task of "classifier"."""
    heads = [head for ending, head in CLASSIFIERS.items() if architecture(config_json).endswith(ending)]
    if heads:
        table = {**table, "classifier": f"heads.{heads[0]}"}
    patterns = [(re.compile(pattern.replace(".", r"\.")), ours) for pattern, ours in table.items()]

    def rename(name: str) -> str | None:
        if name in BUFFERS:
            return None
        stem, _, ending = name.rpartition(".")
        for pattern, ours in patterns:
            if match := pattern.fullmatch(stem):
                return f"{match.expand(ours)}.{OLD_ENDINGS.get(ending, ending)}"
        return name

    return rename


def architecture(config_json: Mapping[str, Any]) -> str:
    """Return the first of config.json's architectures, such as "BertForMaskedLM"; "" without any."""
    names = config_json.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def details(config_json: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the settings that follow from class and weights alone: pooler, heads and classes.

    Raises:
        ValueError: a head that config.json names is not there, or one that is has no meaning here.
    """
    heads = tuple(h for h in HEADS if any(name.startswith(f"heads.{h}.") for name in shapes))
    named = architecture(config_json)
    for ending, head in ARCHITECTURE_HEADS.items():
        if named.endswith(ending) and head not in heads:
            raise ValueError(f"config.json names {named}, but the weights have no {head} head")
    if "classifier.weight" in shapes:
        raise ValueError(
            "the weights have a classifier, but config.json's architecture"
            f" {repr(named) if named else 'is missing and'} does not name its task; supported are"
            f" {', '.join(f'Bert{ending}' for ending in CLASSIFIERS)}"
        )
    found: dict[str, Any] = {"heads": heads, "chooses": named.endswith(CHOICE)}
    for head in CLASSIFIERS.values():
        if rows := shapes.get(f"heads.{head}.weight"):
            found["num_labels"] = rows[0]
    if "pooler.dense.weight" in shapes:
        found["pooler"] = "relu" if config_json.get("model_type") == "distilbert" else "tanh"
    return found


def read_roberta(config_json: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the settings of a RoBERTa, whose table of positions begins with rows that no text uses."""
    positions = config_json.get("max_position_embeddings", 514) - find_first_position(config_json)
    return {**details(config_json, shapes), "max_position_embeddings": positions, "type_vocab_size": 0}


def find_first_position(config_json: Mapping[str, Any]) -> int:
    """Return the first position of a RoBERTa: the number of its padding token plus one."""
    return int(config_json.get("pad_token_id", 1)) + 1


def fold_segment(weights: dict[str, Tensor], config_json: Mapping[str, Any]) -> None:
    """Drop the positions that no text uses, and add RoBERTa's one segment to the rest."""
    positions = weights["embeddings.positions.weight"][find_first_position(config_json) :]
    segments = weights.pop("embeddings.segments.weight", None)
    if segments is not None:
        positions = positions.to(torch.float32) + segments[0].to(torch.float32)
    weights["embeddings.positions.weight"] = positions
