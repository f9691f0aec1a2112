"""One tokenizer.json from a model's tokenizer files, in any of Hugging Face's layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from ....runtime.errors import TokenizerError
from ....runtime.text.tokenizer import (
    WAY_OUT,
    Tokenizer,
    check_ids,
    parse,
    read,
    wrap_tokenizer_errors,
)
from .byte_level import build_byte_level_bpe, find_bpe_files
from .read_files import read_json_object, read_text

_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_BERT_NAMES = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}

# Whose vocab.txt transformers reads as BERT's. Others have a vocab.txt too, and cut words differently.
_BERT_LIKE = ("Bert", "ConvBert", "DistilBert", "Electra", "MobileBert", "SqueezeBert")

# Where sentence-transformers keeps a transformer's settings: it takes the first that is there.
_SENTENCE_MODELS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")


def build_tokenizer_json(folder: Path) -> bytes:
    """Return the tokenizer.json of a folder in Hugging Face layout, in one canonical form.

    Takes the tokenizer.json, or builds a byte-level BPE, GPT-2's or Qwen2's, or BERT's WordPiece from other
    files. Tokens that tokenizer_config.json or special_tokens_map.json name as special are marked so.
    Lower-cases where sentence-transformers would.
    """
    settings = read_settings(folder)
    saved = folder / "tokenizer.json"
    vocab_txt = folder / "vocab.txt"
    if saved.is_file():
        tokenizer = parse(read(saved), str(saved))
        _mark_special(tokenizer, list_special_names(settings))
    elif (files := find_bpe_files(folder)) is not None:
        tokenizer = build_byte_level_bpe(*files, settings)
        _add_tokens(tokenizer, folder, settings)
        _mark_special(tokenizer, list_special_names(settings) or ["<|endoftext|>"])
    elif vocab_txt.is_file():
        names = _BERT_NAMES | find_role_names(settings)
        tokenizer = _build_wordpiece(vocab_txt, names["unk"], settings)
        _add_tokens(tokenizer, folder, settings)
        _mark_special(tokenizer, [*names.values(), *list_special_names(settings)])
        _add_template(tokenizer, vocab_txt, names)
    else:
        raise TokenizerError(
            f"{folder} has neither tokenizer.json nor vocab.json with merges.txt nor vocab.txt; {WAY_OUT}"
        )
    _lower_case(tokenizer, folder)
    check_ids(tokenizer, str(folder))
    return tokenizer.to_str().encode()


def find_special_tokens(folder: Path, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the tokens that have a role, which tokenizer.json itself does not record.

    A role that no file names is BERT's ``[CLS]`` and so on, where the vocabulary has such a token.
    """
    names = _BERT_NAMES | find_role_names(read_settings(folder))
    ids = {role: tokenizer.find_id(names[role]) for role in _ROLES if role in names}
    return {role: token_id for role, token_id in ids.items() if token_id is not None}


@dataclass(frozen=True)
class Frame:
    """The special tokens that a tokenizer.json puts around texts."""

    prefix: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


def find_frame(data: bytes, source: str) -> Frame:
    """Return the special tokens before a text, between the two of a pair, and behind them."""
    tokenizer = parse(data, source)

    def special(first: str, second: str | None = None) -> list[tuple[int, ...]]:
        """Return the special tokens, split at the texts."""
        encoded = tokenizer.encode(first, second)
        parts: list[tuple[int, ...]] = [()]
        previous = None
        for token, sequence in zip(encoded.ids, encoded.sequence_ids, strict=True):
            if sequence is None:
                parts[-1] += (token,)
            elif sequence != previous:
                parts.append(())
            previous = sequence
        return parts

    single = special("a b")
    pair = special("a b", "c d")
    if len(single) != 2 or len(pair) != 3:  # a vocabulary without letters
        return Frame()
    return Frame(single[0], pair[1], single[1])


def read_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json and special_tokens_map.json merged; null counts as missing."""
    config, names = (
        {key: value for key, value in read_json_object(folder / name).items() if value is not None}
        for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    if "added_tokens_decoder" in config:
        return names | config
    # transformers reads the older of the two files last
    return names | config | {key: names[key] for key in names if key.endswith("_token")}


def find_role_names(settings: Mapping[str, Any]) -> dict[str, str]:
    return {role: name for role in _ROLES if (name := _token_text(settings.get(f"{role}_token")))}


def read_named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by the names that transformers has for them, such as ``bos_token``."""
    extra = settings.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **settings}
    texts = {name: _token_text(entry) for name, entry in named.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(entry: object) -> str | None:
    """Return the text of a token that is given as a string or as the fields of an AddedToken."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) and content else None


def list_special_names(settings: Mapping[str, Any]) -> list[str]:
    """Return the tokens that have a role and the further special ones, in a fixed order."""
    names = list(find_role_names(settings).values())
    for extra in map(settings.get, ("additional_special_tokens", "extra_special_tokens")):
        values = extra.values() if isinstance(extra, dict) else extra
        if isinstance(values, Iterable) and not isinstance(values, str):
            names += filter(None, map(_token_text, values))
    return names


def _mark_special(tokenizer: tokenizers.Tokenizer, names: Iterable[str]) -> None:
    added = tokenizer.get_added_tokens_decoder().values()
    known = {token.content for token in added if token.special}
    # A name without an id is left out: a new id would have no row in the model.
    new = [name for name in dict.fromkeys(names) if name not in known]
    new = [name for name in new if tokenizer.token_to_id(name) is not None]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in new])


def _lower_case(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Lower-case texts first where sentence-transformers' own settings ask for it."""
    files = (read_json_object(folder / f"sentence_{name}_config.json") for name in _SENTENCE_MODELS)
    if not next(filter(None, files), {}).get("do_lower_case"):
        return
    own = tokenizer.normalizer
    parts = [] if own is None else [own]
    if isinstance(own, normalizers.Sequence):
        parts = [own[index] for index in range(len(own))]
    if not any(isinstance(part, normalizers.Lowercase) for part in parts):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *parts])


def _build_wordpiece(path: Path, unknown: str, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build BERT's tokenizer, as transformers does from a vocab.txt."""
    kind = " ".join(str(settings.get("tokenizer_class", "BertTokenizer")).split())
    if kind.removesuffix("Fast").removesuffix("Tokenizer") not in _BERT_LIKE:
        raise TokenizerError(
            f"{path} belongs to a {kind}, which is not BERT's; "
            "save the tokenizer.json with save_pretrained of transformers"
        )
    read_text(path)  # refuses what is not UTF-8
    with wrap_tokenizer_errors(str(path)):
        vocab = models.WordPiece.read_file(str(path))  # a token's id is its last line's number
    if unknown not in vocab:
        raise TokenizerError(f"{path} has no {unknown!r} among its {len(vocab)} tokens; {WAY_OUT}")
    flags = {"do_lower_case": True, "tokenize_chinese_chars": True}
    flags |= {name: settings[name] for name in (*flags, "strip_accents") if name in settings}
    for name, value in flags.items():
        if not isinstance(value, bool):
            config = path.with_name("tokenizer_config.json")
            raise TokenizerError(f"{config}: {name} is {value!r}; it must be true or false")
    with wrap_tokenizer_errors(str(path)):
        tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=flags["tokenize_chinese_chars"],
        strip_accents=flags.get("strip_accents"),  # None: as lowercase
        lowercase=flags["do_lower_case"],
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _add_template(tokenizer: tokenizers.Tokenizer, path: Path, names: Mapping[str, str]) -> None:
    """Frame one text as [CLS] A [SEP], two as [CLS] A [SEP] B [SEP]."""
    cls = names["cls"]
    sep = names["sep"]
    ids = [(name, tokenizer.token_to_id(name)) for name in (cls, sep)]
    for name, token_id in ids:
        if token_id is None:
            raise TokenizerError(f"{path} has no {name!r}, which frames every text; {WAY_OUT}")
    with wrap_tokenizer_errors(str(path)):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{cls}:0 $A:0 {sep}:0",
            pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
            special_tokens=ids,
        )


def _add_tokens(tokenizer: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Add what was added to a vocabulary after training, each at the id it was given."""
    path = folder / "added_tokens.json"
    added: dict[str, Any] = {str(index): text for text, index in read_json_object(path).items()}
    if isinstance(config.get("added_tokens_decoder"), dict):
        path = folder / "tokenizer_config.json"
        added |= config["added_tokens_decoder"]
    if not all(index.isdecimal() for index in added):
        raise TokenizerError(f"{path}: the ids of added tokens must be integers; {WAY_OUT}")
    for index, entry in sorted(added.items(), key=lambda item: int(item[0])):
        fields = entry if isinstance(entry, dict) else {"content": entry}
        content = fields.get("content")
        if not isinstance(content, str) or not content:
            raise TokenizerError(f"{path}: added token {index} has no text; {WAY_OUT}")
        flags = {name: fields.get(name) is True for name in ("lstrip", "rstrip", "single_word")}
        special = fields.get("special") is True
        normalized = fields.get("normalized", not special) is True
        token = AddedToken(content, normalized=normalized, special=special, **flags)
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([token])
        if tokenizer.token_to_id(content) != int(index):
            raise TokenizerError(
                f"{path} gives {content!r} the id {index}, but after the vocabulary it would be "
                f"{tokenizer.token_to_id(content)}; {WAY_OUT}"
            )
