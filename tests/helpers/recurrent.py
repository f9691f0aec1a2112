"""Random recurrent encoder-decoders that give varied text, with a letter a token."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from planforge.models import Recurrent, RecurrentConfig, save_model

SPECIALS = ("<pad>", "</s>", "<unk>")
LETTERS = string.ascii_lowercase + " "
WORDS = [
    "a",
    "bahdanau",
    "luong and manning",
    "sutskever",
    "cho",
    "gru lstm",
    "recurrent",
    "zephyr",
    "on",
    "attention",
]
TINY: dict[str, Any] = {
    "source_vocab_size": len(SPECIALS) + len(LETTERS),
    "target_vocab_size": len(SPECIALS) + len(LETTERS),
    "embedding_size": 12,
    "encoder_size": 10,
    "encoder_layers": 2,
    "decoder_size": 14,
    "decoder_layers": 2,
    "attention_size": 9,
    "max_positions": 32,
}
# By the papers that have them: what differs from the default, Bahdanau's.
KINDS: dict[str, dict[str, Any]] = {
    "bahdanau": {},
    "luong": {
        "cell": "lstm",
        "attention": "general",
        "attend": "after",
        "input_feeding": True,
        "deep_output": False,
    },
    "dot": {"attention": "dot", "decoder_size": 20, "decoder_layers": 1, "bridge": "linear"},
    "cho": {"attention": "none", "feed_context": True, "cell": "lstm", "bidirectional": False},
    "sutskever": {"attention": "none", "deep_output": False, "bridge": "copy", "decoder_size": 20},
}

SEEDS = {"bahdanau": 7, "luong": 6, "dot": 5, "cho": 3, "sutskever": 2}


def make_recurrent(kind: str = "bahdanau", **sizes: Any) -> Recurrent:
    """Return a random model; of tiny sizes, targets differ from source to source and end at unequal steps."""
    torch.manual_seed(SEEDS[kind])
    model = Recurrent(RecurrentConfig(**TINY | KINDS[kind] | sizes)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(3)
    for words in (model.source_words, model.target_words):
        words.weight /= 3
    model.output.weight *= 2
    model.output.bias[1] += 1.5  # of the end token
    return model


def write_recurrent(folder: Path, kind: str = "bahdanau", **sizes: Any) -> Path:
    """Save a random model with its tokenizers, and return the folder."""
    save_model(make_recurrent(kind, **sizes), folder)
    vocabulary = {token: number for number, token in enumerate((*SPECIALS, *LETTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    for side in ("source", "target"):
        tokenizer.save(str(folder / f"tokenizer.{side}.json"))
    generation = {
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bad_words_ids": [[0]],
        "max_length": 16,
        "num_beams": 1,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    (folder / "prompts.txt").write_text("".join(f"{word}\n" for word in WORDS), encoding="utf-8")
    return folder


def encode_word(word: str) -> list[int]:
    """Return the tokens that the model reads of a word."""
    return [len(SPECIALS) + LETTERS.index(letter) if letter in LETTERS else 2 for letter in word] + [1]
