"""Publishes GPT-2 and GPT-1: config.json and weights as `gpt2_names` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from .gpt2 import GPT2
from .gpt2_names import EMBEDDINGS, GPT1_GELU, RELATIVES, gpt2_weight

CLASS_NAMES = {"gpt2": "GPT2", "openai-gpt": "OpenAIGPT"}
GPT1_SETTINGS = (
    "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon", "tie_word_embeddings",
)  # fmt: skip
PREFIX = "transformer."


def describe_gpt2(model: GPT2, model_type: str) -> dict[str, Any]:
    """Return config.json's settings; those that a model_type lacks are left out, which reading them shows."""
    settings = asdict(model.config)
    if model_type == "gpt2":
        settings = {name: value for name, value in settings.items() if name not in RELATIVES}
    else:
        activation = settings["activation_function"]
        settings = {name: settings[name] for name in GPT1_SETTINGS}
        settings["afn"] = "gelu" if activation == GPT1_GELU else activation
    return {"architectures": [f"{CLASS_NAMES[model_type]}LMHeadModel"], **settings}


def publish_gpt2(model: GPT2, model_type: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by their published names and in their published form."""
    names = {ours: published for published, ours in EMBEDDINGS.items()} if model_type != "gpt2" else {}
    return {
        name if name.startswith("lm_head.") else PREFIX + names.get(name, name): gpt2_weight(name, tensor)
        for name, tensor in weights.items()
    }
