"""A tokenizer.json beside tokenizer_config.json, read as transformers' AutoTokenizer reads the two."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from planforge.exporter.checkpoints.tokenizers.files import build_tokenizer_json
from planforge.runtime.text.tokenizer import Tokenizer

from ...helpers.text import ODD_TEXTS

transformers = pytest.importorskip("transformers")

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
WORDS = ["John and Zoë went to São Paulo, Ünlü and CAFÉ; don't we'll 12345 ", "the cat sat on the mat. " * 3]
TEXTS = [
    *ODD_TEXTS,
    "John met ZOË in Ünlü's café, São Paulo",
    " leading and  double  spaces ",
    "un<mask>able a <mask> b <mask>",
    "<ent>John<ent> of the<ent>house <ent>",
    "word<Name>word <name> <NAME> a <Name> b",
    "x</s>y [SEP] z <s>",
    "x </S> y",
    "我在Berlin",
    "e\u0301 A\u030a \uac00",
]
# What a file may say of tokens that tokenizer.json has otherwise.
FLAGS = [
    {"lstrip": True},
    {"rstrip": True},
    {"single_word": True},
    {"normalized": True},
    {"special": True, "normalized": False},
    {},
]


@functools.cache
def trained(kind: str) -> str:
    """A vocabulary of one kind as a tokenizer.json that lower-cases, has added tokens and frames nothing."""
    kinds: dict[str, tuple[Any, Any, Any]] = {
        "bytes": (
            models.BPE(),
            trainers.BpeTrainer(
                vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ),
        "pieces": (
            models.BPE(unk_token="<unk>", fuse_unk=True),
            trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL),
            pre_tokenizers.Metaspace(split=False),
        ),
        "unigram": (
            models.Unigram(),
            trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>"),
            pre_tokenizers.Metaspace(),
        ),
        "wordpiece": (
            models.WordPiece(unk_token="[UNK]"),
            trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL),
            pre_tokenizers.BertPreTokenizer(),
        ),
        "words": (
            models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
            trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, end_of_word_suffix="</w>"),
            pre_tokenizers.BertPreTokenizer(),
        ),
    }
    model, trainer, pre_tokenizer = kinds[kind]
    tokenizer: Any = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer.show_progress = False
    both = [text for words in WORDS for text in (words, words.lower(), "cafe sao unlu zoe " + words)]
    tokenizer.train_from_iterator(both * 3, trainer)
    tokenizer.normalizer = normalizers.Lowercase()
    joins = {"bytes": decoders.ByteLevel(), "wordpiece": decoders.WordPiece(), "words": decoders.BPEDecoder()}
    tokenizer.decoder = joins.get(kind, decoders.Metaspace())
    tokenizer.add_tokens([AddedToken("<ent>", normalized=False), AddedToken("<Name>", normalized=False)])
    written: str = tokenizer.to_str()
    return written


def write_folder(
    folder: Path, kind: str, model_type: str | None, settings: dict[str, Any] | None
) -> tokenizers.Tokenizer:
    (folder / "tokenizer.json").write_text(trained(kind))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizers.Tokenizer.from_str(trained(kind))


def check_folder(folder: Path) -> None:
    """Compare ids, frames and decoded texts with AutoTokenizer's."""
    reference = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    data = build_tokenizer_json(folder)
    ours = Tokenizer(data)
    framing = tokenizers.Tokenizer.from_buffer(data)
    for text in TEXTS:
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, parse_special=True) == expected, text
        assert framing.encode(text).ids == reference(text)["input_ids"], text
        decoded = reference.decode(expected, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(expected) == decoded, text
    assert framing.encode("a b", "c d").ids == reference("a b", "c d")["input_ids"]


def name_case(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


ROLES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
CASES: list[tuple[str, str | None, dict[str, Any] | None]] = [
    ("wordpiece", "bert", None),
    ("wordpiece", "bert", {"tokenizer_class": "BertTokenizer", "do_lower_case": False}),
    ("wordpiece", "bert", {"tokenizer_class": "BertTokenizerFast", "strip_accents": False}),
    ("wordpiece", "bert", {"do_lower_case": False, "strip_accents": True}),
    ("wordpiece", "bert", {"tokenize_chinese_chars": False}),
    ("wordpiece", "distilbert", {"tokenizer_class": "DistilBertTokenizer", "do_lower_case": False}),
    ("wordpiece", "modernbert", {"tokenizer_class": "BertTokenizer", "do_lower_case": False}),
    ("wordpiece", "bert", {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}),
    ("wordpiece", "xlm-roberta", {"tokenizer_class": "BertTokenizer", "do_lower_case": False}),
    ("bytes", "roberta", None),
    ("bytes", "roberta", {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True}),
    ("bytes", "roberta", {"tokenizer_class": "BartTokenizer", "trim_offsets": False}),
    ("bytes", "roberta", {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True}),
    ("bytes", "modernbert", {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True}),
    ("bytes", "gpt2", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, **ROLES}),
    ("bytes", "gpt2", ROLES),
    ("bytes", "gpt_neox", {"add_prefix_space": True, **ROLES}),
    ("bytes", "llama", {"tokenizer_class": "LlamaTokenizer", **ROLES}),
    ("bytes", "llama", {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True, **ROLES}),
    ("bytes", "llama", {"tokenizer_class": "GPT2Tokenizer", **ROLES}),
    ("bytes", "qwen2", ROLES),
    ("bytes", "qwen2", {"tokenizer_class": "GPT2Tokenizer", **ROLES}),
    ("bytes", "qwen2", {"tokenizer_class": "PreTrainedTokenizerFast", **ROLES}),
    ("bytes", "qwen3", {"tokenizer_class": "Qwen2Tokenizer", **ROLES}),
    ("pieces", "llama", {"tokenizer_class": "LlamaTokenizer", **ROLES}),
    ("pieces", "llama", {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, **ROLES}),
    ("pieces", "llama", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False, **ROLES}),
    ("pieces", "llama", ROLES),
    ("pieces", "mistral", {"tokenizer_class": "LlamaTokenizer", "legacy": True, **ROLES}),
    ("pieces", "gemma", {"tokenizer_class": "GemmaTokenizer", **ROLES}),
    ("pieces", "gemma3_text", {"tokenizer_class": "GemmaTokenizerFast", **ROLES}),
    ("pieces", "gemma2", ROLES),
    ("unigram", "xlm-roberta", None),
    ("unigram", "xlm-roberta", {"tokenizer_class": "XLMRobertaTokenizer", "add_prefix_space": False}),
    ("unigram", "camembert", {"tokenizer_class": "CamembertTokenizer"}),
    ("unigram", "camembert", {"tokenizer_class": "CamembertTokenizerFast", "add_prefix_space": False}),
    ("unigram", "albert", None),
    (
        "unigram",
        "albert",
        {"tokenizer_class": "AlbertTokenizer", "keep_accents": True, "do_lower_case": False},
    ),
    ("wordpiece", "mpnet", {"tokenizer_class": "MPNetTokenizer", "do_lower_case": False}),
    ("wordpiece", "electra", {"tokenizer_class": "ElectraTokenizer", "strip_accents": False}),
    ("words", "openai-gpt", None),
    ("words", "openai-gpt", {"tokenizer_class": "OpenAIGPTTokenizerFast", "do_lower_case": False, **ROLES}),
    ("bytes", "bart", {"add_prefix_space": True}),
    ("unigram", "bert", {"tokenizer_class": "XLMRobertaTokenizer"}),
    ("unigram", "xlm-roberta", {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}),
    ("wordpiece", None, {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}),
]


@pytest.mark.parametrize(("kind", "model_type", "settings"), CASES, ids=name_case)
def test_a_class_reads_texts_as_transformers_does(
    tmp_path: Path, kind: str, model_type: str | None, settings: dict[str, Any] | None
) -> None:
    write_folder(tmp_path, kind, model_type, settings)
    check_folder(tmp_path)


@pytest.mark.parametrize(("kind", "model_type", "settings"), CASES, ids=name_case)
def test_what_tokenizer_json_puts_around_texts_counts_where_the_class_has_no_frame(
    tmp_path: Path, kind: str, model_type: str | None, settings: dict[str, Any] | None
) -> None:
    own = write_folder(tmp_path, kind, model_type, settings)
    ids = [(name, own.token_to_id(name)) for name in ("<s>", "</s>")]
    own.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A </s> $B:1", ids)
    (tmp_path / "tokenizer.json").write_text(own.to_str())
    check_folder(tmp_path)


@pytest.mark.parametrize(("kind", "model_type", "settings"), CASES[::2], ids=name_case)
def test_an_old_file_does_not_say_its_models_type(
    tmp_path: Path, kind: str, model_type: str | None, settings: dict[str, Any] | None
) -> None:
    write_folder(tmp_path, kind, model_type, settings)
    written = json.loads(trained(kind))
    del written["model"]["type"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    check_folder(tmp_path)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer_config.json"])
def test_of_two_roles_of_one_token_the_last_ones_flags_count(
    tmp_path: Path, name: str, normalized: bool
) -> None:
    """Texts are lower-cased, and so is a token that is normalized: "</S>" is it, or is none."""
    write_folder(tmp_path, "wordpiece", "bert", None)
    written = json.loads(trained("wordpiece"))
    (tmp_path / "tokenizer.json").write_text(json.dumps({**written, "added_tokens": []}))
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": True}
    typed = {"__type": "AddedToken"} if name == "tokenizer_config.json" else {}
    token = {**typed, "content": "</s>", **flags}
    first, last = ("</s>", token) if normalized else (token, "</s>")
    (tmp_path / name).write_text(json.dumps({"sep_token": first, "pad_token": last}))
    check_folder(tmp_path)
    ours = Tokenizer(build_tokenizer_json(tmp_path))
    assert (ours.find_id("</s>") in ours.encode("a </S> b", parse_special=True)) is normalized


@pytest.mark.parametrize("flags", FLAGS, ids=name_case)
@pytest.mark.parametrize(("kind", "model_type", "settings"), CASES[::3], ids=name_case)
def test_flags_of_added_tokens_are_those_of_tokenizer_config(
    tmp_path: Path, kind: str, model_type: str | None, settings: dict[str, Any] | None, flags: dict[str, Any]
) -> None:
    own = write_folder(tmp_path, kind, model_type, settings)
    usual = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}
    entries = {}
    for index, token in own.get_added_tokens_decoder().items():
        of_token = {"special": True} if token.special else {}
        of_token = flags if token.content in ("<ent>", "<Name>", "<mask>") else of_token
        entries[str(index)] = {**usual, **of_token, "content": token.content}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**(settings or {}), "added_tokens_decoder": entries})
    )
    check_folder(tmp_path)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer_config.json"])
def test_flags_of_tokens_with_a_role_are_read(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, "unigram", "camembert", {"tokenizer_class": "PreTrainedTokenizerFast"})
    written = json.loads(trained("unigram"))
    written["added_tokens"] = [token for token in written["added_tokens"] if token["content"] != "<mask>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    mask = {"content": "<mask>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    typed = {"__type": "AddedToken", **mask} if name == "tokenizer_config.json" else mask
    old = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / name).write_text(
        json.dumps((old if name == "tokenizer_config.json" else {}) | {"mask_token": typed})
    )
    check_folder(tmp_path)


def test_a_tokenizer_json_that_frames_texts_keeps_its_frame_without_a_class(tmp_path: Path) -> None:
    own = write_folder(tmp_path, "wordpiece", "bert", {"tokenizer_class": "PreTrainedTokenizerFast"})
    own.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A $B", special_tokens=[("[CLS]", own.token_to_id("[CLS]"))]
    )
    (tmp_path / "tokenizer.json").write_text(own.to_str())
    check_folder(tmp_path)
