"""CLIP's tokenizer in the layouts of checkpoints, with a small vocabulary made as the published one is."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, trainers

from planforge.exporter.verification.golden_samples import TEXTS

CLIPTokenizer: Any = transformers.CLIPTokenizer  # takes pairs as merges, which its annotations do not say
START = "<|startoftext|>"
END = "<|endoftext|>"
WORD_END = "</w>"
FLAGS = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
NAMES: dict[str, Any] = {  # of special_tokens_map.json
    "bos_token": {"content": START, **FLAGS},
    "eos_token": {"content": END, **FLAGS},
    "pad_token": END,
    "unk_token": {"content": END, **FLAGS},
}
SETTINGS: dict[str, Any] = {  # of Stable Diffusion 1's tokenizer_config.json
    **{
        name: {"__type": "AddedToken", **value} if isinstance(value, dict) else value
        for name, value in NAMES.items()
    },
    "add_prefix_space": False,
    "do_lower_case": True,
    "errors": "replace",
    "model_max_length": 77,
    "name_or_path": "openai/clip-vit-large-patch14",
    "special_tokens_map_file": "./special_tokens_map.json",
    "tokenizer_class": "CLIPTokenizer",
}
# What transformers 4 wrote; transformers 5 has the special tokens in it too.
OLD_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


@functools.cache
def train() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and the merges: symbols of bytes, those that end words, merges, start and end."""
    rules = CLIPTokenizer().backend_tokenizer
    tokenizer: Any = tokenizers.Tokenizer(models.BPE(end_of_word_suffix=WORD_END))
    tokenizer.normalizer = rules.normalizer
    tokenizer.pre_tokenizer = rules.pre_tokenizer
    prompts = files("planforge.exporter.calibration").joinpath("prompts.txt").read_text(encoding="utf-8")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1500, end_of_word_suffix=WORD_END, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, *prompts.splitlines()], trainer)
    merges = [(first, second) for first, second in json.loads(tokenizer.to_str())["model"]["merges"]]
    assert len(merges) > 900
    symbols = [*alphabet, *(symbol + WORD_END for symbol in alphabet)]
    tokens = dict.fromkeys([*symbols, *(first + second for first, second in merges), START, END])
    return {token: index for index, token in enumerate(tokens)}, merges


def write_published(folder: Path, pad: str = END, **settings: Any) -> None:
    """Writes the files of Stable Diffusion's folder ``tokenizer``; a setting that is ``...`` is left out."""
    vocab, merges = train()
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    write_settings(folder, pad, **settings)


def write_settings(folder: Path, pad: str = END, **settings: Any) -> None:
    """Writes what transformers 4 wrote beside the vocabulary."""
    wanted = {**SETTINGS, "pad_token": pad, **settings}
    kept = {name: value for name, value in wanted.items() if value is not ...}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps({**NAMES, "pad_token": pad}), encoding="utf-8")


def write_saved(folder: Path, pad: str = END) -> None:
    """Writes what transformers 5 saves."""
    vocab, merges = train()
    saved = CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77, pad_token=pad)
    saved.save_pretrained(folder)
    assert not (folder / "vocab.json").exists()


def write_letters(folder: Path) -> None:
    """Writes what transformers 5 saves of a vocabulary of a few letters, without those of other texts."""
    letters = "aehnost"
    symbols = [*letters, *(letter + WORD_END for letter in letters), "th", "the" + WORD_END, START, END]
    vocab = {token: index for index, token in enumerate(symbols)}
    merges = [("t", "h"), ("th", "e" + WORD_END)]
    CLIPTokenizer(vocab=vocab, merges=merges).save_pretrained(folder)


def write_class_alone(folder: Path) -> None:
    """Writes a vocabulary, and of settings the class alone."""
    write_published(folder)
    (folder / "special_tokens_map.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizer"}')


def write_converted(folder: Path, pad: str = END, **changes: Any) -> None:
    """Writes a tokenizer.json as transformers 4 converted it, with parts of it replaced."""
    write_saved(folder)
    path = folder / "tokenizer.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    written["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = OLD_WORDS
    for token in written["added_tokens"]:
        token["normalized"] = True
    del written["model"]["type"]
    written["model"]["merges"] = [" ".join(pair) for pair in written["model"]["merges"]]
    path.write_text(json.dumps(written | changes), encoding="utf-8")
    write_settings(folder, pad)
