"""vocab.json and merges.txt of several models, read as transformers' AutoTokenizer reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Trainable
from tokenizers import models, pre_tokenizers, trainers

from planforge.exporter.checkpoints.tokenizers.files import build_tokenizer_json
from planforge.runtime.errors import TokenizerError
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.text import END, ODD_TEXTS

CHAT = "<|im_end|>"
LANGUAGES = [
    "In 2024 we've sold 1,234,567 of them, I'LL say; you're 3.14 times as many.\r\n\r\n\tDone  \n",
    "Größe: 12½ m², naïve Fußgänger — Ωμέγα, ещё 100 рублей",
    "こんにちは世界2024年。中文字符123，한국어 7개, हिन्दी १२३, עברית 5, ไทย ๒๕๖๗",
    "cafe\u0301 and caf\u00e9, A\u030angstro\u0308m, \uac00 \u1100\u1161, \ufb01 \u2126 x\u0323\u0307",
    f"code(){{\n    return  a[10]==b;\n}}{CHAT}\n{END}#hash _under_",
    *ODD_TEXTS,
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a vocabulary and merges, some of several digits, that were trained on the texts."""
    folder = tmp_path_factory.mktemp("trained")
    tokenizer: Any = Trainable(models.BPE())
    words = pre_tokenizers.Split(" ", "merged_with_next")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    plain = [text.replace(END, "").replace(CHAT, "") for text in LANGUAGES]
    tokenizer.train_from_iterator(plain * 3, trainer)
    tokenizer.model.save(str(folder))
    return folder


def write_folder(trained: Path, folder: Path, model_type: str | None, declared: str | None) -> Path:
    """Write the files of a checkpoint of this type, whose tokenizer names this class."""
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_bytes((trained / name).read_bytes())
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    first = len(json.loads((trained / "vocab.json").read_bytes()))
    added = {str(first + i): {"content": text, "special": True} for i, text in enumerate((END, CHAT))}
    settings: dict[str, Any] = {"added_tokens_decoder": added, "eos_token": CHAT, "pad_token": END}
    if declared is not None:
        settings["tokenizer_class"] = declared
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("model_type", "declared", "single_digits"),
    [
        ("qwen2", None, True),
        ("qwen2", "Qwen2Tokenizer", True),
        ("qwen2", "GPT2Tokenizer", True),  # which transformers takes for a mistake
        ("qwen3", "Qwen2TokenizerFast", True),
        ("qwen3", None, True),
        ("llama", "Qwen2Tokenizer", True),
        ("llama", "GPT2TokenizerFast", False),
        ("gpt2", None, False),
        ("starcoder2", None, False),
    ],
)
def test_texts_are_cut_as_transformers_cuts_them(
    trained: Path, tmp_path: Path, model_type: str, declared: str | None, single_digits: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_folder(trained, tmp_path, model_type, declared)
    reference = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    own = Tokenizer(build_tokenizer_json(folder))
    for text in LANGUAGES:
        assert own.encode(text, parse_special=True) == reference(text)["input_ids"], text
        ids = own.encode(text)
        assert ids == reference(text, split_special_tokens=True)["input_ids"], text
        assert own.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)
    assert (len(own.encode("2024")) == 4) is single_digits


@pytest.mark.parametrize(
    ("model_type", "declared", "named"),
    [
        ("mistral", "GPT2Tokenizer", "model_type 'mistral' is read from tokenizer.json only"),
        ("granite", None, "model_type 'granite' is read from tokenizer.json only"),
        ("llama", None, "model_type 'llama' has no usual one"),
        ("llama", "PreTrainedTokenizerFast", "class is PreTrainedTokenizerFast"),
    ],
)
def test_what_transformers_cannot_read_is_refused(
    trained: Path, tmp_path: Path, model_type: str, declared: str | None, named: str
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_folder(trained, tmp_path, model_type, declared)
    with pytest.raises(ValueError, match="Couldn't instantiate"):
        transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with pytest.raises(TokenizerError, match=named) as caught:
        build_tokenizer_json(folder)
    assert str(folder) in str(caught.value)


def test_a_class_that_cuts_otherwise_is_refused(trained: Path, tmp_path: Path) -> None:
    folder = write_folder(trained, tmp_path, None, "RobertaTokenizer")
    with pytest.raises(TokenizerError, match="class is RobertaTokenizer; only GPT2"):
        build_tokenizer_json(folder)
