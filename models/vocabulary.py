"""Checks that config.json, the tokenizer and the embedding of a checkpoint have the same vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 64 * 2**20  # of a tokenizer.json: those of large vocabularies have 35 MB
# Embeddings by our names, with the setting of our configs that says how many rows they have.
EMBEDDINGS = {
    "wte.weight": "vocab_size",
    "embed_tokens.weight": "vocab_size",
    "embeddings.words.weight": "vocab_size",
    "words.weight": "vocab_size",
    "directions.weight": "vocab_size",
    "shared.weight": "source_vocab_size",
    "source.words.weight": "source_vocab_size",
    "target.words.weight": "target_vocab_size",
    "source_words.weight": "source_vocab_size",
    "target_words.weight": "target_vocab_size",
}


def check_vocabulary(
    folder: Path, config_json: Mapping[str, Any], config: Any, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse an embedding that has more or fewer rows than config.json says.

    Args:
        folder: the checkpoint's folder.
        config_json: the published config.
        config: ours.
        shapes: the weights' shapes, by our names.

    Raises:
        ValueError: has the rows, config.json's number and the tokenizer's tokens, and says what to change.
    """
    for name, setting in EMBEDDINGS.items():
        shape = shapes.get(name, shapes.get(f"decoder.{name}"))
        size = getattr(config, setting, None)
        if not shape or size is None or shape[0] == size:
            continue
        published = setting if setting in config_json else "vocab_size"
        tokens = count_tokens(folder / "tokenizer.json")
        counted = "" if tokens is None else f", and tokenizer.json has {tokens} tokens"
        raise ValueError(
            f"{folder}: config.json's {published} is {size}, the embedding has {shape[0]} rows{counted}:"
            f" {find_hint(published, shape[0], tokens)}"
        )


def find_hint(setting: str, rows: int, tokens: int | None) -> str:
    """Return advice about an embedding whose number of rows differs from config.json's."""
    if tokens is None or tokens <= rows:
        return f"set {setting} to {rows}"
    return (
        "take the tokenizer that the model was trained with, or add the missing rows in transformers:"
        f" model.resize_token_embeddings({tokens}), then save_pretrained"
    )


def count_tokens(file: Path) -> int | None:
    """Return one more than the largest id of a tokenizer.json; None where it cannot be read."""
    try:
        if file.stat().st_size > MAX_BYTES:
            return None
        written = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = written["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = [token["id"] for token in written.get("added_tokens") or []]
        largest: int = max([*ids, *added])
        return 1 + largest
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
