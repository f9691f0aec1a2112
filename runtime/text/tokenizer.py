"""Text to token ids and back, from one tokenizer.json; and that file from a model's folder."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from ..errors import InputError, TokenizerError
from .stream import TextStream

MAX_BYTES = 256 * 2**20
_WAY_OUT = "save it again with save_pretrained of transformers, or copy the file once more"


class Tokenizer:
    """A loaded tokenizer.json; safe to use from several threads.

    Truncation, padding and BPE dropout that were saved with it are off: they are settings of
    training, and would change what a prompt means without a word.

    Args:
        data: The bytes of a tokenizer.json, which the caller may have hashed before.
        source: What error messages call it.

    Attributes:
        byte_level: Whether tokens stand for bytes, joined as they are (GPT-2).
        byte_fallback: Whether some tokens, such as ``<0xE2>``, stand for a byte (SentencePiece).

    Raises:
        TokenizerError: The content is not a tokenizer.

    Example:
        >>> tokenizer = Tokenizer.from_file(Path("bundles/gpt2/tokenizer.json"))
        >>> tokenizer.decode(tokenizer.encode("Hello"))
        'Hello'
    """

    def __init__(self, data: bytes, source: str = "tokenizer.json") -> None:
        self._source = source
        self._plain = _parse(data, source)
        # Set once, here: switching it per call would race with another thread's encode.
        self._plain.encode_special_tokens = True
        added = self._plain.get_added_tokens_decoder()
        self._special = {token.content for token in added.values() if token.special}
        self._special_ids = {self._plain.token_to_id(content) for content in self._special}
        self._vocab_size = max(self._plain.get_vocab().values(), default=-1) + 1
        decoder = self._plain.decoder
        self.byte_level = isinstance(decoder, decoders.ByteLevel)
        self.byte_fallback = "ByteFallback" in str(decoder)

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Load a tokenizer.json.

        Raises:
            TokenizerError: The file is missing, over 256 MiB, or not a tokenizer.
        """
        return cls(_read(path), str(path))

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id; a model may have rows beyond it."""
        return self._vocab_size

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled ``text`` in the vocabulary, or None."""
        return self._plain.token_to_id(text)

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id, such as ``"Ġthe"``; None if it decodes to nothing.

        Raises:
            InputError: The id is outside the vocabulary.
        """
        spelled = self._plain.id_to_token(self._checked(token_id))
        return None if spelled is None or spelled in self._special else spelled

    def spelling(self, token_id: int) -> str:
        """How the vocabulary spells an id, special tokens too, such as ``"<|endoftext|>"``.

        Raises:
            InputError: The id is outside the vocabulary.
        """
        return self._plain.id_to_token(self._checked(token_id)) or ""

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Turn a text into token ids, adding none of its own.

        Args:
            text: Any text.
            parse_special: Whether a special token's text, such as ``<|endoftext|>``, becomes that
                token. Leave it off for text that users wrote.

        Raises:
            InputError: ``text`` is no str, or holds half of a surrogate pair.
            TokenizerError: The vocabulary cannot express the text and has no unknown token.
        """
        if not isinstance(text, str):
            raise InputError(f"text is {type(text).__name__}; it must be a str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"text has a lone surrogate ({text[error.start]!r}) at character {error.start}, "
                "which no UTF-8 text contains; decode its source with errors='replace'"
            ) from error
        chosen = self._parsing if parse_special else self._plain
        with _blamed(self._source):
            ids = chosen.encode(text, add_special_tokens=False).ids
        if parse_special or self._special_ids.isdisjoint(ids):
            return ids
        return [plain for token_id in ids for plain in self._without_special(token_id)]

    def decode(self, ids: Sequence[int]) -> str:
        """Turn token ids into text; special tokens and unassigned ids add nothing.

        Bytes that are not UTF-8 become U+FFFD.

        Raises:
            InputError: An id is outside the vocabulary.
        """
        checked = [self._checked(token_id) for token_id in ids]
        with _blamed(self._source):
            return self._plain.decode(checked, skip_special_tokens=True)

    def stream(self) -> TextStream:
        """A new decoder for ids that come one at a time."""
        return TextStream(self)

    def _checked(self, token_id: int) -> int:
        try:
            index = operator.index(token_id)
        except TypeError as error:
            raise InputError(f"token id {token_id!r} is not an integer") from error
        if not 0 <= index < self._vocab_size:
            raise InputError(
                f"token id {index} is not in the vocabulary, whose ids are 0 to "
                f"{self._vocab_size - 1}; use the tokenizer that belongs to the model"
            )
        return index

    @cached_property
    def _parsing(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self._plain.to_str())  # the flag is not saved with it

    @cached_property
    def _unknown(self) -> int | None:
        model = json.loads(self._plain.to_str())["model"]
        if model.get("unk_token") is not None:
            return self._plain.token_to_id(model["unk_token"])
        unknown: int | None = model.get("unk_id")
        return unknown

    def _without_special(self, token_id: int) -> list[int]:
        """Spell out a special token that the model itself matched in plain text.

        Unigram and WordLevel know special tokens as ordinary entries, so that "</s>" in a user's
        text becomes the end of sequence even where tokenizers was told to read it as text.
        """
        text = self._plain.id_to_token(token_id) or ""
        if token_id not in self._special_ids or token_id == self._unknown or len(text) == 1:
            return [token_id]
        letters = map(self._plain.token_to_id, text)
        plain = [self._unknown if each in self._special_ids else each for each in letters]
        known = [self._unknown if each is None else each for each in plain]
        return [each for each in known if each is not None]


def tokenizer_json(folder: Path) -> bytes:
    """The tokenizer.json of a folder in Hugging Face layout, in one canonical form.

    Takes the folder's tokenizer.json, or builds GPT-2's byte-level BPE from vocab.json and
    merges.txt (or encoder.json and vocab.bpe). Tokens that tokenizer_config.json or
    special_tokens_map.json name as special are marked so.

    Args:
        folder: The model's folder.

    Returns:
        JSON text in UTF-8, without saved truncation, padding and dropout.

    Raises:
        TokenizerError: A file is missing or malformed; names it and the reason.
    """
    config = _json_object(folder / "tokenizer_config.json")
    named = _special_names(_json_object(folder / "special_tokens_map.json") | config)
    saved = folder / "tokenizer.json"
    if saved.is_file():
        tokenizer = _parse(_read(saved), str(saved))
    else:
        tokenizer = _byte_level_bpe(folder, add_prefix_space=config.get("add_prefix_space") is True)
        _add_tokens(tokenizer, folder, config)
        named = named or ["<|endoftext|>"]
    added = tokenizer.get_added_tokens_decoder().values()
    known = {token.content for token in added if token.special}
    # A name without an id is left out: a new id would have no row in the model.
    new = [name for name in named if name not in known and tokenizer.token_to_id(name) is not None]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in new])
    return tokenizer.to_str().encode()


def _byte_level_bpe(folder: Path, add_prefix_space: bool) -> tokenizers.Tokenizer:
    for names in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        vocab_file, merges_file = (folder / name for name in names)
        if vocab_file.is_file() and merges_file.is_file():
            break
    else:
        raise TokenizerError(
            f"{folder} has neither tokenizer.json nor vocab.json with merges.txt; {_WAY_OUT}"
        )
    vocab = _vocab(vocab_file)
    merges = _merges(merges_file)
    with _blamed(str(merges_file)):
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _vocab(path: Path) -> dict[str, int]:
    vocab = _json_object(path)
    if not all(type(index) is int and 0 <= index < 2**31 for index in vocab.values()):
        raise TokenizerError(f"{path}: ids must be integers from 0; {_WAY_OUT}")
    if len(set(vocab.values())) != len(vocab):
        raise TokenizerError(f"{path}: two tokens have the same id; {_WAY_OUT}")
    missing = sum(symbol not in vocab for symbol in pre_tokenizers.ByteLevel.alphabet())
    if missing:  # tokenizers would drop those bytes from the text and say nothing
        raise TokenizerError(
            f"{path}: not a byte-level vocabulary, {missing} of 256 byte symbols are missing; "
            "save the tokenizer.json with save_pretrained of transformers"
        )
    return vocab


def _merges(path: Path) -> list[tuple[str, str]]:
    try:
        lines = _read(path).decode().split("\n")  # not splitlines: only "\n" ends a merge
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8: {error.reason}; {_WAY_OUT}") from error
    merges = []
    for number, line in enumerate(lines, start=1):
        parts = line.rstrip("\r").split(" ")
        if parts == [""] or (number == 1 and line.startswith("#version")):
            continue
        if len(parts) != 2 or not all(parts):
            raise TokenizerError(f"{path}, line {number}: a merge is two tokens and one space; {_WAY_OUT}")
        merges.append((parts[0], parts[1]))
    return merges


def _special_names(config: Mapping[str, Any]) -> list[str]:
    """The contents of the tokens that a configuration gives a role, in a fixed order."""
    roles = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    entries = [config.get(f"{role}_token") for role in roles]
    for extra in map(config.get, ("additional_special_tokens", "extra_special_tokens")):
        values = extra.values() if isinstance(extra, dict) else extra
        entries += values if isinstance(values, Iterable) and not isinstance(values, str) else []
    contents = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    return list(dict.fromkeys(name for name in contents if isinstance(name, str) and name))


def _add_tokens(tokenizer: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Add what was added to a vocabulary after training, each at the id it was given."""
    path = folder / "added_tokens.json"
    added: dict[str, Any] = {str(index): text for text, index in _json_object(path).items()}
    if isinstance(config.get("added_tokens_decoder"), dict):
        path = folder / "tokenizer_config.json"
        added |= config["added_tokens_decoder"]
    if not all(index.isdecimal() for index in added):
        raise TokenizerError(f"{path}: the ids of added tokens must be integers; {_WAY_OUT}")
    for index, entry in sorted(added.items(), key=lambda item: int(item[0])):
        fields = entry if isinstance(entry, dict) else {"content": entry}
        content = fields.get("content")
        if not isinstance(content, str) or not content:
            raise TokenizerError(f"{path}: added token {index} has no text; {_WAY_OUT}")
        flags = {name: fields.get(name) is True for name in ("lstrip", "rstrip", "single_word")}
        special = fields.get("special") is True
        normalized = fields.get("normalized", not special) is True
        token = AddedToken(content, normalized=normalized, special=special, **flags)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(content) != int(index):
            raise TokenizerError(
                f"{path} gives {content!r} the id {index}, but after the vocabulary it would be "
                f"{tokenizer.token_to_id(content)}; {_WAY_OUT}"
            )


def _parse(data: bytes, source: str) -> tokenizers.Tokenizer:
    with _blamed(source):
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if isinstance(tokenizer.model, models.BPE):
            tokenizer.model.dropout = None
        return tokenizer


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {_one_line(error)}; {_WAY_OUT}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object; {_WAY_OUT}")
    return value


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise TokenizerError(
            f"{path} is larger than {MAX_BYTES // 2**20} MiB, which no tokenizer is; "
            "check that it is the right file"
        )
    return data


@contextmanager
def _blamed(source: str) -> Iterator[None]:
    """Turn whatever tokenizers raises into one line that names the file."""
    try:
        yield
    except BaseException as error:
        # A panic in Rust comes as pyo3's PanicException: no Exception, and not importable.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{source} is unusable: {_one_line(error)}; {_WAY_OUT}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
