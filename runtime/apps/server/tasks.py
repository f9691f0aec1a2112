"""Has a row for each task of models: what a model can be asked for, and what /v1/models tells of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...encode.zero_shot import NEEDS_INFERENCE

if TYPE_CHECKING:
    from ...encode.text_encoder import TextEncoder
    from ...generate.text_generator import TextGenerator
    from ...images.image_generator import ImageGenerator
    from ...translate.translator import Translator

# Tasks of encoders, and what clients call them.
ENCODERS = {
    "embed": "embeddings",
    "embed_sparse": "embed_sparse",
    "classify": "classify",
    "rank": "rerank",
    "tag": "tags",
    "answer": "answers",
    "fill_mask": "fill-mask",
}
# What an error says beside which model cannot do it.
NEEDS = {"classify": f"; candidate_labels {NEEDS_INFERENCE}"}


@dataclass(frozen=True)
class Task:
    """What differs between the models of a task.

    Attributes:
        list_capabilities: returns the last words of the routes that a model answers.
        describe: returns fields of a model's entry in /v1/models.
        shares_steps: whether requests share the steps of a model, and prompts that begin alike.
    """

    list_capabilities: Callable[[Any], tuple[str, ...]]
    describe: Callable[[Any], dict[str, Any]]
    shares_steps: bool = False


def list_encoders_capabilities(model: TextEncoder) -> tuple[str, ...]:
    able = [name for task, name in ENCODERS.items() if task in model.tasks]
    if len(model.labels) != 1 and "rerank" in able:  # its head is classify's
        able.remove("rerank")
    return (*able, "matches") if list_match_kinds(model) else tuple(able)


def list_match_kinds(model: TextEncoder) -> list[str]:
    """Return by what a model matches tokens: sparse weights, vectors of tokens (multi), or both."""
    return [kind for kind in ("sparse", "multi") if f"embed_{kind}" in model.tasks]


def describe_encoder(model: TextEncoder) -> dict[str, Any]:
    mask = model.defaults.tokens.get("mask")
    told: dict[str, Any] = {} if mask is None else {"mask_token": model.tokenizer.spell(mask)}
    if kinds := list_match_kinds(model):
        told["matches"] = kinds
    return {"labels": list(model.labels), **told}


def describe_translator(model: Translator) -> dict[str, Any]:
    has_attention = any(spec.role.startswith("cross_attention.") for spec in model.artifact.outputs)
    return {"languages": list(model.languages), "alignments": has_attention}


def list_generators_capabilities(model: TextGenerator) -> tuple[str, ...]:
    return ("chat", "completions") if model.has_chat else ("completions",)


def describe_pictures(model: ImageGenerator) -> dict[str, Any]:
    return {"image_size": f"{model.defaults.width}x{model.defaults.height}"}


TASKS = {
    "text-generation": Task(
        list_generators_capabilities, lambda model: {"tools": model.has_tools}, shares_steps=True
    ),
    "retrieval-generation": Task(
        list_generators_capabilities, lambda model: {"tools": model.has_tools}, shares_steps=True
    ),
    "text-encoding": Task(list_encoders_capabilities, describe_encoder),
    "translation": Task(lambda model: ("translations",), describe_translator),
    "image-generation": Task(lambda model: ("images/generations", "images/edits"), describe_pictures),
}
