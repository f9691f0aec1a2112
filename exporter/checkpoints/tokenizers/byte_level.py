"""Byte-level BPE from vocab.json and merges.txt, which do not say how texts are cut into words.

That depends on the tokenizer's class in transformers, by whose rules it is chosen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from ....runtime.errors import TokenizerError
from ....runtime.text.tokenizer import WAY_OUT, wrap_tokenizer_errors
from .read_files import read_json_object, read_text

GPT2 = "GPT2"
QWEN2 = "Qwen2"
# By the names of classes without "Tokenizer" and "Fast".
CUTS = {GPT2: GPT2, "CodeGen": GPT2, QWEN2: QWEN2}
# What transformers takes for model_types whose files name no class.
USUAL = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "codegen", "opt", "phi", "starcoder2"), GPT2),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), QWEN2),
}
ALWAYS_USUAL = ("qwen2",)  # whatever class their files name
# Of these it reads a tokenizer.json only: their words are cut in ways that no class has.
NO_CLASS = ("granite", "ministral", "mistral", "olmo2", "olmo3", "phi3")

# Qwen2Tokenizer's: single digits, a word with the sign before it, ends of lines apart from other spaces.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def find_bpe_files(folder: Path) -> tuple[Path, Path] | None:
    """Return the vocabulary and the merges of a folder; None where it does not have both."""
    for vocab, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if (folder / vocab).is_file() and (folder / merges).is_file():
            return folder / vocab, folder / merges
    return None


def build_byte_level_bpe(vocab: Path, merges: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build the tokenizer, as transformers does from the two files."""
    cut = choose_cut(vocab.parent, settings)
    ids = _read_vocab(vocab)
    pairs = _read_merges(merges)
    with wrap_tokenizer_errors(str(merges)):
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs))
    add_prefix_space = settings.get("add_prefix_space") is True
    if cut == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def choose_cut(folder: Path, settings: Mapping[str, Any]) -> str:
    """Return whose way a folder's tokenizer cuts texts: GPT2 or QWEN2.

    Raises:
        TokenizerError: transformers reads no such files of the model, or with another class; names both.
    """
    config = read_json_object(folder / "config.json")
    model_type = config.get("model_type")
    declared = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if model_type in NO_CLASS:
        why = f"model_type {model_type!r} is read from tokenizer.json only"
    elif model_type in ALWAYS_USUAL or declared is None:
        if model_type is None:
            return GPT2
        if model_type in USUAL:
            return USUAL[model_type]
        why = f"no class is named for them, in tokenizer_config.json, and model_type {model_type!r} has none"
    else:
        name = str(declared).removesuffix("Fast").removesuffix("Tokenizer")
        if name in CUTS:
            return CUTS[name]
        why = f"they belong to a {declared}; read are those of {', '.join(CUTS)}"
    raise TokenizerError(
        f"{folder}: vocab.json and merges.txt do not say how texts are cut into words: {why}. Add the"
        " tokenizer.json of the checkpoint"
    )


def _read_vocab(path: Path) -> dict[str, int]:
    vocab = read_json_object(path)
    if not all(type(index) is int and 0 <= index < 2**31 for index in vocab.values()):
        raise TokenizerError(f"{path}: ids must be integers from 0; {WAY_OUT}")
    if len(set(vocab.values())) != len(vocab):
        raise TokenizerError(f"{path}: two tokens have the same id; {WAY_OUT}")
    missing = sum(symbol not in vocab for symbol in pre_tokenizers.ByteLevel.alphabet())
    if missing:  # tokenizers would drop those bytes from the text and say nothing
        raise TokenizerError(
            f"{path}: not a byte-level vocabulary, {missing} of 256 byte symbols are missing; "
            "save the tokenizer.json with save_pretrained of transformers"
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
