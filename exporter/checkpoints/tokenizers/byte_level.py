"""Byte-level BPE from vocab.json and merges.txt, which do not say how texts are cut into words.

That depends on the tokenizer's class in transformers, by whose rules it is chosen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from ....runtime.errors import TokenizerError
from ....runtime.text.tokenizer import WAY_OUT, wrap_tokenizer_errors
from .classes import (
    ALIASES,
    ALWAYS_USUAL,
    CLASSES,
    NO_CLASS,
    USUAL,
    WORD_END,
    TokenizerClass,
    shorten_class,
)
from .read_files import read_json_object, read_text

CUTS = ("GPT2", "CodeGen", "Qwen2", "CLIP")  # classes without "Tokenizer" and "Fast"


def find_bpe_files(folder: Path) -> tuple[Path, Path] | None:
    """Return the vocabulary and the merges of a folder; None where it does not have both."""
    for vocab, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if (folder / vocab).is_file() and (folder / merges).is_file():
            return folder / vocab, folder / merges
    return None


def read_byte_level_bpe(vocab: Path, merges: Path, kind: TokenizerClass) -> tokenizers.Tokenizer:
    """Read the vocabulary and the merges of the two files of a class."""
    ids = _read_vocab(vocab, kind.word_end)
    pairs = _read_merges(merges)
    with wrap_tokenizer_errors(str(merges)):
        return tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs))


def choose_cut(folder: Path, settings: Mapping[str, Any]) -> TokenizerClass:
    """Return the class whose rules a folder's tokenizer follows to cut texts: GPT-2's, Qwen2's or CLIP's.

    Raises:
        TokenizerError: transformers reads no such files of the model, or with another class; names both.
    """
    config = read_json_object(folder / "config.json")
    model_type = config.get("model_type")
    declared = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if model_type in NO_CLASS:
        why = f"model_type {model_type!r} is read from tokenizer.json only"
    elif model_type in ALWAYS_USUAL or declared is None:
        usual = USUAL.get(str(model_type), "GPT2" if model_type is None else "")
        if usual in CUTS:
            return CLASSES[usual]
        why = f"tokenizer_config.json has no tokenizer_class, and model_type {model_type!r} has no usual one"
    else:
        name = shorten_class(declared)
        if name in CUTS:
            return CLASSES[ALIASES.get(name, name)]
        why = f"their class is {declared}; only {', '.join(CUTS)} are supported"
    raise TokenizerError(
        f"{folder}: vocab.json and merges.txt do not say how to pre-tokenize texts: {why}. Add the"
        " checkpoint's tokenizer.json"
    )


def _read_vocab(path: Path, word_end: str) -> dict[str, int]:
    vocab = read_json_object(path)
    if not all(type(index) is int and 0 <= index < 2**31 for index in vocab.values()):
        raise TokenizerError(f"{path}: ids must be integers from 0; {WAY_OUT}")
    if len(set(vocab.values())) != len(vocab):
        raise TokenizerError(f"{path}: two tokens have the same id; {WAY_OUT}")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    symbols = {symbol + end for symbol in alphabet for end in ("", word_end)}
    missing = len(symbols - vocab.keys())
    if missing:  # tokenizers would drop those bytes from the text, or read "unknown", and say nothing
        raise TokenizerError(
            f"{path}: not a byte-level vocabulary, {missing} of {len(symbols)} byte symbols are missing; "
            "save the tokenizer.json with save_pretrained of transformers"
        )
    if not word_end and all(symbol + WORD_END in vocab for symbol in alphabet):
        raise TokenizerError(
            f"{path}: tokens end words with {WORD_END}, as CLIP's do, but the class is another; if they are"
            ' CLIP\'s, put "tokenizer_class": "CLIPTokenizer" into tokenizer_config.json'
        )
    return vocab


def _read_merges(path: Path) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):  # only "\n" ends a merge
        parts = line.rstrip("\r").split(" ")
        if parts == [""] or (number == 1 and line.startswith("#version")):
            continue
        if len(parts) != 2 or not all(parts):
            raise TokenizerError(f"{path}, line {number}: a merge is two tokens and one space; {WAY_OUT}")
        merges.append((parts[0], parts[1]))
    return merges
