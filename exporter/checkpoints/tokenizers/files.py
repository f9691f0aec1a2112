"""One tokenizer.json from a model's tokenizer files, in any of Hugging Face's layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers

from ....runtime.bundle.defaults import SpecialTokens
from ....runtime.errors import TokenizerError
from ....runtime.text.tokenizer import (
    WAY_OUT,
    Tokenizer,
    check_ids,
    parse,
    read,
    wrap_tokenizer_errors,
)
from .added_tokens import FLAGS, add_tokens, read_added
from .byte_level import choose_cut, find_bpe_files, read_byte_level_bpe
from .classes import (
    ALIASES,
    BERT_NAMES,
    CLASSES,
    Names,
    TokenizerClass,
    apply_class,
    apply_framing,
    choose_class,
    list_normalizers,
    read_flags,
    shorten_class,
)
from .read_files import read_json_object, read_text

_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

# Where sentence-transformers keeps a transformer's settings: it takes the first that is there.
_SENTENCE_MODELS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")


def build_tokenizer_json(folder: Path) -> bytes:
    """Return the tokenizer.json of a folder in Hugging Face layout, in one canonical form.

    Takes the tokenizer.json, or reads a byte-level BPE, GPT-2's, Qwen2's or CLIP's, or BERT's WordPiece from
    other files. What the tokenizer's class and tokenizer_config.json say counts more, as in transformers 5.
    Lower-cases where sentence-transformers would.
    """
    settings = read_settings(folder)
    saved = folder / "tokenizer.json"
    vocab_txt = folder / "vocab.txt"
    files = find_bpe_files(folder)
    kind: TokenizerClass | None
    if saved.is_file():
        source = saved
        tokenizer = parse(read(saved), str(saved))
        # Written again: old files do not say what type their model has.
        kind = choose_class(folder, settings, tokenizer.to_str().encode())
    elif files is not None:
        source = files[0]
        kind = choose_cut(folder, settings)
        tokenizer = read_byte_level_bpe(*files, kind)
    elif vocab_txt.is_file():
        source = vocab_txt
        kind = CLASSES["Bert"]
        tokenizer = _read_wordpiece(
            vocab_txt, find_role_names(settings).get("unk", kind.names["unk"]), settings
        )
    else:
        raise TokenizerError(
            f"{folder} has neither tokenizer.json nor vocab.json with merges.txt nor vocab.txt; {WAY_OUT}"
        )
    names = {**({} if kind is None else kind.names), **find_role_names(settings)}
    special = list_special_tokens(settings, names)
    added = read_added(folder, settings, tokenizer, special)
    flags = read_flags(folder, settings)
    if kind is not None:
        tokenizer = apply_class(tokenizer, kind, flags, names)
    add_tokens(tokenizer, added, special)
    if kind is not None and kind.framing is not None:
        apply_framing(tokenizer, kind.framing, flags, names, source)
    lower_case(tokenizer, folder)
    check_ids(tokenizer, str(folder))
    return tokenizer.to_str().encode()


def find_special_tokens(folder: Path, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the tokens that have a role, which tokenizer.json itself does not record.

    A role that no file names is that of the tokenizer's class, BERT's ``[CLS]`` and so on where that has
    none, if the vocabulary has such a token.
    """
    settings = read_settings(folder)
    kind = choose_class(folder, settings)
    names = {**(BERT_NAMES if kind is None else kind.names), **find_role_names(settings)}
    ids = {role: tokenizer.find_id(names[role]) for role in _ROLES if role in names}
    return {role: token_id for role, token_id in ids.items() if token_id is not None}


def find_frames(data: bytes, source: str) -> tuple[SpecialTokens, SpecialTokens] | None:
    """Return the special tokens around a text, and around and between two.

    None where they are unknown: in a vocabulary without letters.
    """
    tokenizer = parse(data, source)
    if not any(map(tokenizer.num_special_tokens_to_add, (False, True))):
        return SpecialTokens(), SpecialTokens()

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
    if len(single) != 2 or len(pair) != 3:
        return None
    prefix, between, suffix = pair
    return SpecialTokens(single[0], (), single[1]), SpecialTokens(prefix, between, suffix)


def reads_segments(folder: Path, data: bytes) -> bool:
    """Return whether transformers tells a model which tokens belong to a pair's second text.

    It does where its tokenizer has token_type_ids among its model_input_names, as BERT's class has.
    """
    settings = read_settings(folder)
    named = settings.get("model_input_names")
    if not isinstance(named, list):
        has_files = (folder / "tokenizer.json").is_file() or find_bpe_files(folder) is not None
        kind = choose_class(folder, settings) if has_files else CLASSES["Bert"]
        if kind is not CLASSES["Bert"]:
            return False
    elif "token_type_ids" not in named:
        return False
    encoded = parse(data, str(folder)).encode("a", "a")
    pairs = zip(encoded.sequence_ids, encoded.type_ids, strict=True)
    return all(kind == 1 for sequence, kind in pairs if sequence == 1)


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


def list_special_tokens(settings: Mapping[str, Any], names: Names) -> list[AddedToken]:
    """Return the tokens that have a role and the further special ones, with their flags.

    Of two with the same text and other flags the last counts, as in transformers, which adds all in turn.
    """
    entries = [settings.get(f"{role}_token") or names[role] for role in _ROLES if role in names]
    for extra in map(settings.get, ("additional_special_tokens", "extra_special_tokens")):
        values = extra.values() if isinstance(extra, dict) else extra
        if isinstance(values, Iterable) and not isinstance(values, str):
            entries += values
    tokens: dict[str, AddedToken] = {}
    for entry in entries:
        text = _token_text(entry)
        if text is not None:
            flags = {name: entry.get(name) is True for name in FLAGS} if isinstance(entry, dict) else {}
            normalized = isinstance(entry, dict) and entry.get("normalized") is True
            tokens[text] = AddedToken(text, special=True, normalized=normalized, **flags)
    return list(tokens.values())


def lower_case(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Lower-case texts first where sentence-transformers' own settings ask for it."""
    files = (read_json_object(folder / f"sentence_{name}_config.json") for name in _SENTENCE_MODELS)
    if not next(filter(None, files), {}).get("do_lower_case"):
        return
    parts = list_normalizers(tokenizer)
    if not any(isinstance(part, normalizers.Lowercase) for part in parts):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *parts])


def _read_wordpiece(path: Path, unknown: str, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Read BERT's vocabulary from a vocab.txt."""
    name = shorten_class(settings.get("tokenizer_class", "BertTokenizer"))
    if ALIASES.get(name, name) != "Bert":
        raise TokenizerError(
            f"{path} belongs to a {settings['tokenizer_class']}, which is not BERT's; "
            "save the tokenizer.json with save_pretrained of transformers"
        )
    read_text(path)  # refuses what is not UTF-8
    with wrap_tokenizer_errors(str(path)):
        vocab = models.WordPiece.read_file(str(path))  # a token's id is its last line's number
    if unknown not in vocab:
        raise TokenizerError(f"{path} has no {unknown!r} among its {len(vocab)} tokens; {WAY_OUT}")
    with wrap_tokenizer_errors(str(path)):
        return tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown))
