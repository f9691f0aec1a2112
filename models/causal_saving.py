"""Publishes decoders with a head: config.json and weights as `causal_names` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .bert_names import architecture
from .causal_encoder import CausalEncoder
from .causal_names import BODY, HEADS, OLD_PREFIX

if TYPE_CHECKING:
    from .saving import Layout

DECODER_ENDING = "ForCausalLM"
GPT_ENDING = "LMHeadModel"
GPT1 = "OpenAIGPT"
# How transformers' classes with these heads end; all but the first have a bias.
ENDINGS = {
    "sequence_classification": "ForSequenceClassification",
    "token_classification": "ForTokenClassification",
    "question_answering": "ForQuestionAnswering",
}
WITHOUT_BIAS = "sequence_classification"


@dataclass(frozen=True)
class HeadNames:
    """The names that differ from one model_type's classes to another's.

    Attributes:
        tagger: the name of the head on each token.
        reader: what stands before the names of the decoder's weights in a class that answers questions.
    """

    tagger: str = "score"
    reader: str = OLD_PREFIX


HEAD_NAMES = {"gpt2": HeadNames(tagger="classifier"), "mistral": HeadNames(reader="model.")}


def add_head_to_layout(layout: Layout) -> Layout:
    """Return the layout of the same decoders where they have a head, and read whole texts."""

    def describe(model: CausalEncoder, model_type: str) -> dict[str, Any]:
        settings = layout.describe(model.decoder, model_type)
        name = architecture(settings).removesuffix(DECODER_ENDING).removesuffix(GPT_ENDING)
        check_head(model, name)
        (head,) = model.config.heads
        pads = {"pad_token_id": model.config.pad_token}
        return {**settings, "architectures": [name + ENDINGS[head]], **pads}

    def publish(model: CausalEncoder, model_type: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        body = {name.removeprefix(BODY): tensor for name, tensor in weights.items() if name.startswith(BODY)}
        (head,) = model.config.heads
        row = HEAD_NAMES.get(model_type, HeadNames())
        name = row.tagger if head == "token_classification" else HEADS[ENDINGS[head]][0]
        own = {kind: weights.get(f"heads.{head}.{kind}") for kind in ("weight", "bias")}
        found = {f"{name}.{kind}": tensor for kind, tensor in own.items() if tensor is not None}
        published = layout.publish(model.decoder, model_type, body)
        if head == "question_answering":
            published = {row.reader + strip_prefix(n): tensor for n, tensor in published.items()}
        return {**published, **found}

    return replace(layout, describe=describe, publish=publish)


def strip_prefix(name: str) -> str:
    """Return a published name without what stands before all of a decoder's."""
    return name.removeprefix("model.").removeprefix(OLD_PREFIX)


def check_head(model: CausalEncoder, name: str) -> None:
    """Refuse heads of which transformers has no class that begins with this name."""
    config = model.config
    if config.chooses or len(config.heads) != 1:
        heads = "one that rates choices" if config.chooses else f"{list(config.heads)}"
        raise ValueError(f"it needs one head, which classifies, tags or answers, not {heads}")
    (head,) = config.heads
    if name == GPT1 and head != WITHOUT_BIAS:
        raise ValueError(f"transformers has no {name}{ENDINGS[head]}, but {name}{ENDINGS[WITHOUT_BIAS]}")
    if config.head_bias != (head != WITHOUT_BIAS):
        raise ValueError(
            f"head_bias={config.head_bias} must be {head != WITHOUT_BIAS}, as in {name}{ENDINGS[head]}"
        )
