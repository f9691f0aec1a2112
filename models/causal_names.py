"""Maps the published weights of decoders with heads to those of a `CausalEncoder`, by their family's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .bert_names import Rename, architecture
from .causal_encoder import CausalEncoder, CausalEncoderConfig
from .config_json import Json, read_count

if TYPE_CHECKING:
    from .families import Family

BODY = "decoder."  # what stands before the names of the decoder's own weights
# How a class of transformers ends that has a head on a decoder, with the names of the head and its task.
HEADS = {
    "ForSequenceClassification": ("score", "sequence_classification"),
    "ForTokenClassification": ("score|classifier", "token_classification"),
    "ForQuestionAnswering": ("qa_outputs", "question_answering"),
    "DoubleHeadsModel": ("multiple_choice_head.summary", "sequence_classification"),
}
DOUBLE = "DoubleHeadsModel"
OLD_PREFIX = "transformer."  # of the Llama family's QuestionAnswering
OUTPUT = "lm_head.weight"  # of a double-heads model; a text is read, and not continued
# What transformers' summary of a text may do: read the choice token, and project it to one logit.
SUMMARY = {
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "summary_activation": None,
    "summary_proj_to_labels": True,
}


def find_ending(config_json: Json) -> str | None:
    """Return how the name of a decoder's class with a head ends; None for other classes."""
    return next((ending for ending in HEADS if architecture(config_json).endswith(ending)), None)


def make_family_with_head(family: Family) -> Family:
    """Return the family of the same decoders where they have heads, and read whole texts."""

    def rename(config_json: Json) -> Rename:
        return rename_by(family.rename(config_json), config_json)

    def convert(name: str, tensor: Tensor) -> Tensor:
        return family.converted(name.removeprefix(BODY), tensor)

    def list_parts(config: CausalEncoderConfig, name: str) -> Mapping[str, int]:
        parts = family.parts(config.decoder, name.removeprefix(BODY))
        return {f"{BODY}{part}": rows for part, rows in parts.items()}

    def read(config_json: Json, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        own = {name.removeprefix(BODY): shape for name, shape in shapes.items() if name.startswith(BODY)}
        decoder_json, bidirectional = read_direction(config_json)
        decoder = family.read_config(decoder_json, own)
        head = read_head(config_json, shapes)
        return vars(CausalEncoderConfig.from_decoder(decoder, **head, bidirectional=bidirectional))

    return replace(
        family,
        model=CausalEncoder,
        config=CausalEncoderConfig,
        rename=rename,
        converted=convert,
        parts=list_parts,
        tied=lambda config: {f"{BODY}{a}": f"{BODY}{b}" for a, b in family.tied(config.decoder).items()},
        unread=(f"{BODY}{OUTPUT}",),
        settings={},
        fixed={},
        details=read,
        with_head=None,
    )


def rename_by(rename: Rename, config_json: Json) -> Rename:
    """Return the renaming of a class with a head, given that of its decoder."""
    ending = find_ending(config_json)
    names, head = HEADS[ending] if ending is not None else ("", "")

    def rename_all(name: str) -> str | None:
        name = name.removeprefix(OLD_PREFIX)
        stem, _, kind = name.rpartition(".")
        if stem in names.split("|"):
            return f"heads.{head}.{kind}"
        ours = rename(name)
        return None if ours is None else f"{BODY}{ours}"

    return rename_all


def read_direction(config_json: Json) -> tuple[Json, bool]:
    """Return the settings of the decoder, and whether its tokens see those behind them too.

    Gemma 3 then counts a window's tokens on both sides, the token itself in each of them.
    """
    if config_json.get("model_type") != "gemma3_text" or not config_json.get("use_bidirectional_attention"):
        return config_json, False
    decoder = {name: value for name, value in config_json.items() if name != "use_bidirectional_attention"}
    window = read_count({"sliding_window": 4096, **config_json}, "sliding_window")
    return {**decoder, "sliding_window": window // 2 + 1}, True


def read_head(config_json: Json, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the settings of the head.

    Raises:
        ValueError: the weights lack the head that config.json names, or it reads texts in another way.
    """
    ending = find_ending(config_json)
    if ending is None:
        return {}
    _, head = HEADS[ending]
    shape = shapes.get(f"heads.{head}.weight")
    if shape is None:
        named = architecture(config_json)
        raise ValueError(f"config.json names {named}, but the weights have no {head} head")
    chooses = ending == DOUBLE
    if chooses:
        check_summary(config_json)
    return {
        "heads": (head,),
        "num_labels": shape[0],
        "head_bias": f"heads.{head}.bias" in shapes,
        "chooses": chooses,
        "pad_token": None if chooses else config_json.get("pad_token_id"),
    }


def add_score_rows(weights: dict[str, Tensor], config: CausalEncoderConfig) -> None:
    """Add the rows of the decoder's output by which two tokens score a text."""
    output = weights.get(f"{BODY}{OUTPUT}", weights.get(f"{BODY}embed_tokens.weight"))
    if config.score_tokens is not None and output is not None:
        rows = [output[token] for token in config.score_tokens if token is not None]
        weights["heads.sequence_classification.rows.weight"] = torch.stack(rows).to(torch.float32)


def check_summary(config_json: Json) -> None:
    """Refuse a summary of texts that is another than the projection of one token."""
    for name, value in SUMMARY.items():
        given = config_json.get(name, value)
        if given != value:
            named = architecture(config_json)
            whole = named.replace(DOUBLE, "LMHeadModel")
            raise ValueError(
                f"config.json sets {name}={given!r}; of a {named} only {value!r} is supported. Train the head"
                f" so, or save the model without it, as a {whole}"
            )
