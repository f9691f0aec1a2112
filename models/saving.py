"""Saves reference models as folders in Hugging Face's layout, which `load_model` reads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from .families import FAMILIES, gpt2_weight
from .folder import SINGLE
from .gpt2 import GPT2
from .marian_names import config_json_of, translate_to_marian
from .transformer import Transformer


def save_model(model: GPT2 | Transformer, folder: str | Path, model_type: str | None = None) -> None:
    """Write config.json and model.safetensors, so that `load_model` reads them.

    Args:
        model: a GPT2 is written so that transformers reads it too.
        folder: created if it does not exist.
        model_type: of a Transformer "transformer" (by default), or "marian": so that transformers reads it.

    Raises:
        ValueError: the model has the caller's own parts, or is not a model of that type; nothing is written.
    """
    known = ("gpt2",) if isinstance(model, GPT2) else ("transformer", "marian")
    if model_type is not None and model_type not in known:
        raise ValueError(f"model_type={model_type!r} is not one of {', '.join(known)}")
    if isinstance(model, Transformer) and (own := model.custom_parts()):
        raise ValueError(
            f"a Transformer with its own {' and '.join(own)} cannot be saved: it runs in PyTorch only"
        )
    config, published = layout_of(model, model_type or known[0])
    weights = {name: tensor.detach().contiguous() for name, tensor in published.items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})


def layout_of(model: GPT2 | Transformer, model_type: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the weights in published form; shared weights come once."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    if isinstance(model, GPT2):
        config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **asdict(model.config)}
        prefix = FAMILIES["gpt2"].prefix
        return config, {
            ("" if name.startswith("lm_head.") else prefix) + name: gpt2_weight(name, tensor)
            for name, tensor in weights.items()
        }
    if model_type == "transformer":
        return {"model_type": "transformer", **asdict(model.config)}, weights
    config = config_json_of(model.config)
    published = {
        translate_to_marian(name): tensor[None] if name == "output.bias" else tensor
        for name, tensor in weights.items()
    }
    words = model.source.words.weight
    if model.config.share_embeddings and model.config.tie_word_embeddings:
        published["model.shared.weight"] = published.pop("model.encoder.embed_tokens.weight")
    elif model.config.share_embeddings:  # where the output is not tied, transformers 5 ties nothing
        for name in ("model.shared.weight", "model.decoder.embed_tokens.weight"):
            published[name] = words.clone()
    return config, published
