"""The first step of a model, which no client has to wait for."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

from ...encode.text_encoder import TextEncoder
from ...errors import InputError
from ...generate.text_generator import TextGenerator
from ...model import Model
from ...translate.translator import Translator

TEXT = "a"
# What an encoder can be asked for, by the last word of a route: the task, and a text or a pair for it.
EXAMPLES: dict[str, tuple[str, Any]] = {
    "embeddings": ("embed", TEXT),
    "classify": ("classify", TEXT),
    "rerank": ("rank", (TEXT, TEXT)),
    "tags": ("tag", TEXT),
    "answers": ("answer", (TEXT, TEXT)),
}


def warm_up(model: Model, capabilities: Collection[str]) -> None:
    """Let a model compute one token or one text, as its first request would.

    Memory is allocated and touched then, and what cannot run is known before clients are told that it can.
    """
    with suppress(InputError):  # says something of this text, not of the model
        if isinstance(model, TextGenerator):
            model.submit([0], max_new_tokens=1, ignore_eos=True).result()
        elif isinstance(model, Translator):
            model.submit([TEXT], max_new_tokens=1).result()
        else:
            assert isinstance(model, TextEncoder)
            warm_up_encoder(model, capabilities)


def warm_up_encoder(encoder: Any, capabilities: Collection[str]) -> None:
    """Let an encoder do one of its tasks."""
    for capability, (task, item) in EXAMPLES.items():
        if capability in capabilities:
            encoder.submit(task, [item]).result()
            return
    if "fill-mask" in capabilities:
        encoder.submit("fill_mask", [encoder.tokenizer.spell(encoder.defaults.tokens["mask"])]).result()
