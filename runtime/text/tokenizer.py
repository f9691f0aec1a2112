"""Text to token ids and back, from one tokenizer.json."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import models

from ..errors import InputError, TokenizerError
from .stream import IncrementalDecoder, encode_piece, is_byte

MAX_BYTES = 256 * 2**20
MAX_IDS = 2**24
FEW_IDS = 256  # decoded by tokenizers' `decode`, which lets no other thread run but takes half the time
BYTE_LEVEL = re.compile(r"(Sequence\(decoders=\[)?ByteLevel\([^()]*\)(\]\))?")  # a decoder, described
SPACE_BYTE = "<0x20>"  # how a vocabulary with byte fallback spells the byte of a space
WAY_OUT = "save it again with save_pretrained of transformers, or copy the file once more"


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """The tokens of one text, and where in the text each of them comes from."""

    ids: list[int]
    _raw: tokenizers.Encoding = field(repr=False)
    _sources: list[int] | None = field(default=None, repr=False)  # each id's token in _raw; None: its own

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Each token's place in the text, as ``text[start:end]``; a new list at every reading."""
        offsets = self._raw.offsets
        return offsets if self._sources is None else [offsets[index] for index in self._sources]

    @property
    def words(self) -> list[int | None]:
        """The number of the word that each token is part of, from 0; a new list at every reading.

        What a word is, the pre-tokenizer says: for BERT, a punctuation mark is one too. Where it splits no
        text at spaces (see `Tokenizer.splits_words`), all may be one.
        """
        words = self._raw.word_ids
        return words if self._sources is None else [words[index] for index in self._sources]


class Spellings(dict[int, str]):
    """The spellings of ids, each found when it is first asked for."""

    def __init__(self, spell: Callable[[int], str]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, token_id: int) -> str:
        spelled = self[token_id] = self._spell(token_id)
        return spelled


class Tokenizer:
    """A loaded tokenizer.json, which errors call `source`; safe to use from several threads.

    Truncation, padding and BPE dropout that were saved with it are off: they are settings of
    training, and would change what a prompt means without a word.
    Methods that take ids raise `InputError` for one that is outside the vocabulary.
    """

    language_codes: tuple[str, ...] = ()  # what a text may begin with to choose a language, such as ">>fra<<"

    def __init__(self, data: bytes, source: str = "tokenizer.json") -> None:
        self._source = source
        self._plain = parse(data, source)
        # Set once, here: switching it per call would race with another thread's encode.
        self._plain.encode_special_tokens = True
        added = self._plain.get_added_tokens_decoder()
        self._special = {token.content for token in added.values() if token.special}
        self._special_ids = {self._plain.token_to_id(content) for content in self._special}
        self.special_tokens = tuple(sorted(self._special))
        self.added_tokens = tuple(sorted(token.content for token in added.values()))  # special ones too
        self.vocab_size = count_ids(self._plain)  # a model may have rows beyond it
        decoder = str(self._plain.decoder)
        self.byte_level = BYTE_LEVEL.fullmatch(decoder) is not None  # tokens stand for bytes (GPT-2)
        self.byte_fallback = "ByteFallback" in decoder  # some do, such as <0xE2> (SentencePiece)
        # What a token adds to the text depends on the tokens around it (the first BPE, CTC).
        self.decodes_words = "BPEDecoder" in decoder or "CTC" in decoder

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Load a tokenizer.json of at most 256 MiB."""
        return cls(read(path), str(path))

    def find_id(self, text: str) -> int | None:
        """Return the id of the token spelled ``text`` in the vocabulary, or None."""
        return self._plain.token_to_id(text)

    def find_piece(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of an id, such as ``"Ġthe"``; None if it decodes to nothing."""
        spelled = self._plain.id_to_token(self._check_id(token_id))
        return None if spelled is None or spelled in self._special else spelled

    def spell(self, token_id: int) -> str:
        """Return how the vocabulary spells an id, special tokens too, such as ``"<|endoftext|>"``."""
        return self._plain.id_to_token(self._check_id(token_id)) or ""

    def find_bytes(self, token_id: int, *, begins: bool = False) -> bytes:
        """Return the bytes that a token adds to a text, which may be part of a character; of some none.

        With `begins` no other token of the text comes before it: there decoding drops the space before a
        word of some vocabularies.
        """
        piece = self.find_piece(token_id)
        if piece is None:
            return b""
        if self.byte_level:
            return encode_piece(piece)
        if self.byte_fallback and is_byte(piece) and not (begins and piece == SPACE_BYTE):
            return bytes.fromhex(piece[3:5])
        alone = self.decode([token_id])
        if begins:
            return alone.encode()
        return self.decode([token_id, token_id])[len(alone) :].encode()

    def show(self, token_id: int, *, begins: bool = False) -> str:
        """Return what a token adds to a text, to be shown; a special one as it is spelled.

        Part of a character is U+FFFD.
        """
        if self.find_piece(token_id) is None:
            return self.spell(token_id)
        return self.find_bytes(token_id, begins=begins).decode(errors="replace")

    def find_context(self, ids: Sequence[int]) -> list[int]:
        """Return the one of a text's tokens that decoding needs to go on with it; none of an empty text.

        It is the last that adds to the text. One that spells a byte is passed over where there is another:
        bytes that follow would be read together with it. Ids beyond the vocabulary are passed over too.
        """
        context: list[int] = []
        for token_id in reversed(ids):
            piece = self.find_piece(token_id) if token_id < self.vocab_size else None
            if piece is None:
                continue
            if not (self.byte_fallback and is_byte(piece)):
                return [token_id]
            context = context or [token_id]
        return context

    def spell_all(self, ids: Sequence[int]) -> list[str]:
        """Return the spelling of each id; of those that were asked for before at once."""
        return list(map(self._known_spellings.__getitem__, ids))

    @cached_property
    def _known_spellings(self) -> Spellings:
        return Spellings(self.spell)

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Turn a text into token ids, adding none of its own.

        With `parse_special` a special token's text, such as ``<|endoftext|>``, becomes that token. Leave it
        off for text that users wrote. Raises an InputError where the text is no str or holds half of a
        surrogate pair, and a TokenizerError where the vocabulary cannot express it.
        """
        check_text(text)
        tokenizer = self._parsing if parse_special else self._plain
        with wrap_tokenizer_errors(self._source):
            (raw,) = tokenizer.encode_batch([text], add_special_tokens=False)  # `encode` lets no thread run
        ids: list[int] = raw.ids
        if parse_special or self._special_ids.isdisjoint(ids):
            return ids
        return [plain for token_id in ids for plain in self._spell_out(token_id)]

    def encode_batch(
        self, texts: Sequence[str], parse_special: bool = False, first_index: int = 0
    ) -> list[Encoding]:
        """Turn texts into token ids as `encode` does, on all cores, keeping where each token comes from.

        An error calls the first text by `first_index`.
        """
        if isinstance(texts, str | bytes):
            raise InputError(f"texts is {type(texts).__name__}; it must be a sequence of str")
        for index, text in enumerate(texts, first_index):
            check_text(text, index)
        tokenizer = self._parsing if parse_special else self._plain
        with wrap_tokenizer_errors(self._source):
            encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        if parse_special:
            return [Encoding(raw.ids, raw) for raw in encodings]
        return [self._make_plain(raw) for raw in encodings]

    def encode_prompted(self, prompt: str, texts: Sequence[str], first_index: int = 0) -> list[list[int]]:
        """Return the token ids of texts behind a prompt that may spell special tokens, and texts may not.

        What is read as a special token lies in the prompt whole: a text neither spells nor completes one.
        """
        joined = [prompt + text for text in texts]
        parsed = self.encode_batch(joined, parse_special=True, first_index=first_index)
        return [
            self._encode_behind(prompt, text, encoding) for text, encoding in zip(joined, parsed, strict=True)
        ]

    def _encode_behind(self, prompt: str, joined: str, parsed: Encoding) -> list[int]:
        """Return the ids of a text that begins with a prompt, of which `parsed` has all special tokens."""
        cut = 0  # where the prompt's last special token ends
        for token_id, (start, end) in zip(parsed.ids, parsed.offsets, strict=True):
            spelled = joined[start:end]  # with the spaces that the token takes in
            is_unknown_word = token_id == self.unknown and spelled.strip() not in self._special
            if token_id not in self._special_ids or is_unknown_word:
                continue
            if start + len(spelled.rstrip()) > len(prompt):
                return [*self.encode(joined[:cut], parse_special=True), *self.encode(joined[cut:])]
            cut = end
        return parsed.ids

    def find_unknown(self, text: str, parse_special: bool = False) -> list[str]:
        """Return the parts of a text, such as letters, that `encode` turns into the unknown token."""
        (encoding,) = self.encode_batch([text], parse_special)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [text[start:end] for token_id, (start, end) in pairs if token_id == self.unknown]

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is a special one."""
        return token_id in self._special_ids

    def find_disguised(self, text: str, parsed: Encoding) -> list[tuple[int, int]]:
        """Return where a text becomes a special token only once it is normalized, as ``text[start:end]``.

        `parsed` is the text with all special tokens. The unknown token stands for any text.
        """
        special = [index for index, token_id in enumerate(parsed.ids) if token_id in self._special_ids]
        offsets = parsed.offsets if special else []
        return [
            offsets[index]
            for index in special
            if parsed.ids[index] != self.unknown
            and text[slice(*offsets[index])].strip() != self.spell(parsed.ids[index])
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Turn token ids into text; special tokens and unassigned ids add nothing.

        Bytes that are not UTF-8 become U+FFFD.
        """
        checked = [self._check_id(token_id) for token_id in ids]
        with wrap_tokenizer_errors(self._source):
            if len(checked) <= FEW_IDS:
                return self._plain.decode(checked, skip_special_tokens=True)
            (text,) = self._plain.decode_batch([checked], skip_special_tokens=True)
        return text

    def decode_known(self, ids: Sequence[int], context: Sequence[int] = ()) -> str:
        """Decode what a model chose: ids beyond the vocabulary, which some models have, add nothing.

        `context` is what `find_context` says of the text that it goes on with.
        """
        known = [token for token in ids if token < self.vocab_size]
        return self.decode([*context, *known]).removeprefix(self.decode(context))

    def write_json(self) -> str:
        """Return the tokenizer as a tokenizer.json, without what was left out."""
        return self._plain.to_str()

    def stream(self, context: Sequence[int] = ()) -> IncrementalDecoder:
        """Return a new decoder for ids that come one at a time.

        `context` is what `find_context` says of the text that they go on with.
        """
        return IncrementalDecoder(self, context)

    def _check_id(self, token_id: int) -> int:
        try:
            index = operator.index(token_id)
        except TypeError as error:
            raise InputError(f"token id {token_id!r} is not an integer") from error
        if not 0 <= index < self.vocab_size:
            raise InputError(
                f"token id {index} is not in the vocabulary, whose ids are 0 to "
                f"{self.vocab_size - 1}; use the tokenizer that belongs to the model"
            )
        return index

    @cached_property
    def _parsing(self) -> tokenizers.Tokenizer:
        with wrap_tokenizer_errors(self._source):
            return tokenizers.Tokenizer.from_str(self._plain.to_str())  # the flag is not saved with it

    @cached_property
    def unknown(self) -> int | None:
        """The id of the unknown token, if there is one."""
        model = json.loads(self._plain.to_str())["model"]
        if model.get("unk_token") is not None:
            return self._plain.token_to_id(model["unk_token"])
        unknown: int | None = model.get("unk_id")
        return unknown

    @cached_property
    def splits_words(self) -> bool:
        """Whether the pre-tokenizer tells words apart; Gemma's does not, and some of SentencePiece's."""
        (two,) = self.encode_batch(["a a"])
        return len(set(two.words)) > 1

    def _make_plain(self, raw: tokenizers.Encoding) -> Encoding:
        ids = raw.ids
        if self._special_ids.isdisjoint(ids):
            return Encoding(ids, raw)
        spelled = [self._spell_out(token_id) for token_id in ids]
        sources = [index for index, plain in enumerate(spelled) for _ in plain]
        return Encoding([token_id for plain in spelled for token_id in plain], raw, sources)

    def _spell_out(self, token_id: int) -> list[int]:
        """Spell out a special token that the model itself matched in plain text.

        Unigram and WordLevel know special tokens as ordinary entries, so that "</s>" in a user's
        text becomes the end of sequence even where tokenizers was told to read it as text.
        """
        text = self._plain.id_to_token(token_id) or ""
        if token_id not in self._special_ids or token_id == self.unknown or len(text) == 1:
            return [token_id]
        letters = map(self._plain.token_to_id, text)
        unreadable = {None, *self._special_ids}
        plain = [self.unknown if letter in unreadable else letter for letter in letters]
        return [letter for letter in plain if letter is not None]


def check_text(text: str, index: int | None = None) -> None:
    """Refuse what tokenizers would fail on; ``index`` is the text's place in a batch."""
    name = "text" if index is None else f"texts[{index}]"
    if not isinstance(text, str):
        raise InputError(f"{name} is {type(text).__name__}; it must be a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} has a lone surrogate ({text[error.start]!r}) at character {error.start}, "
            "which no UTF-8 text contains; decode its source with errors='replace'"
        ) from error


def parse(data: bytes, source: str) -> tokenizers.Tokenizer:
    """Load a tokenizer.json without its saved truncation, padding and dropout."""
    with wrap_tokenizer_errors(source):
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if isinstance(tokenizer.model, models.BPE):
            tokenizer.model.dropout = None
    check_ids(tokenizer, source)
    return tokenizer


def check_ids(tokenizer: tokenizers.Tokenizer, source: str) -> None:
    """Refuse ids so large that writing the tokenizer, which lists all that are missing, takes gigabytes."""
    highest = count_ids(tokenizer) - 1
    if highest >= MAX_IDS:
        raise TokenizerError(f"{source} has a token with the id {highest}, above {MAX_IDS - 1}; {WAY_OUT}")


def count_ids(tokenizer: tokenizers.Tokenizer) -> int:
    """Return one more than the highest id of any token."""
    count: int = tokenizer.get_vocab_size()
    if None not in map(tokenizer.id_to_token, range(count)):
        return count  # that many tokens have the ids below; the vocabulary as a dict takes 10 MB
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def read(path: Path) -> bytes:
    """Return the content of a file of at most MAX_BYTES."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise TokenizerError(
            f"{path} is larger than {MAX_BYTES // 2**20} MiB, too large for a tokenizer; "
            "check that it is the right file"
        )
    return data


@contextmanager
def wrap_tokenizer_errors(source: str) -> Iterator[None]:
    """Turn whatever tokenizers raises into one line that names the file."""
    try:
        yield
    except BaseException as error:
        # A panic in Rust comes as pyo3's PanicException: no Exception, and not importable.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{source} is unusable: {join_lines(error)}; {WAY_OUT}") from error


def join_lines(error: BaseException) -> str:
    """Return an error's text without line ends, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
