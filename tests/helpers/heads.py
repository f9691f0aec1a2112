"""Random decoders with heads and relatives of GPT-2, as folders with a tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from planforge.exporter.checkpoints.source import find_demo

from .models import TINY

TINY_NEO: dict[str, Any] = {
    **{"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64},
    **{"attention_types": [[["global", "local"], 1]], "window_size": 4, "initializer_range": 0.2},
    **{"bos_token_id": 0, "eos_token_id": 0},
}
TINY_LLAMA: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.2},
}
# By how the names of their classes begin: sizes, and the demo whose tokenizer they have.
KINDS = {
    "GPT2": (TINY, "gpt2-demo"),
    "OpenAIGPT": (TINY, "gpt2-demo"),
    "GPTNeo": (TINY_NEO, "gpt2-demo"),
    "Llama": (TINY_LLAMA, "llama-demo"),
}


def write_decoder(folder: Path, name: str, *, choice: str | None = None, **settings: Any) -> Any:
    """Write a random checkpoint with a demo's tokenizer; return transformers' model.

    Args:
        folder: is made.
        name: a class of transformers, such as "GPT2ForSequenceClassification".
        choice: a token to add as the tokenizer's cls_token.
        settings: of its config.
    """
    kind = next(kind for kind in KINDS if name.startswith(kind))
    sizes, demo = KINDS[kind]
    shutil.copytree(find_demo(demo), folder, ignore=shutil.ignore_patterns("*.safetensors", "generation_*"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if choice is not None:
        tokenizer.add_special_tokens({"cls_token": choice})
        tokenizer.save_pretrained(folder)
    config = getattr(transformers, f"{kind}Config")(**sizes | {"vocab_size": len(tokenizer)} | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, name)(config).eval()
    model.save_pretrained(folder)
    return model
