"""MarianMT's tokenizers: SentencePiece pieces, numbered by a vocabulary of both languages."""

from __future__ import annotations

import base64
import itertools
import json
import math
import operator
import re
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import InputError, TokenizerError
from .stream import TextStream
from .tokenizer import Tokenizer, check_text, read

# What the exporter writes before an entry's spelling. tokenizers' Unigram needs one list for two things:
ID_ONLY = "\U0010ffff"  # the vocabulary has it, this language's pieces do not: no text is cut into it
PIECE_ONLY = "\U0010fffe"  # texts are cut into it, the vocabulary lacks it: it becomes the unknown token

SPACE = "▁"  # how pieces spell a space
CODES_SHOWN = 20


class PieceTokenizer(Tokenizer):
    """One language's side of a MarianMT tokenizer; safe to use from several threads.

    Gives the ids of transformers' MarianTokenizer. SentencePiece is computed here: tokenizers'
    Precompiled replaces whole graphemes, and its Unigram adds scores in another precision, so that a
    few texts, such as a row of dots, would come out otherwise.

    Args:
        data: What the exporter's build_marian_tokenizers made, a tokenizer.json.
        source: What error messages call it.
        vocab_size: The model's.

    Raises:
        TokenizerError: The content is not such a tokenizer, or has more ids than the model.

    Example:
        >>> tokenizer = PieceTokenizer.from_file(Path("bundles/opus/tokenizer.json"), 58101)
        >>> tokenizer.decode(tokenizer.encode(">>de<< Good morning."))
        '>>de<< Good morning.'
    """

    def __init__(self, data: bytes, source: str, vocab_size: int) -> None:
        super().__init__(data, source)
        try:
            self._read(json.loads(data))
        except (AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
            raise TokenizerError(f"{source} is not a tokenizer of pieces; export the model again") from error
        if len(self._spellings) > vocab_size:
            raise TokenizerError(
                f"{source} has {len(self._spellings)} tokens, but the model {vocab_size}; "
                "use the tokenizer that belongs to the model"
            )
        self._vocab_size = vocab_size

    @classmethod
    def from_file(cls, path: Path, vocab_size: int) -> PieceTokenizer:  # type: ignore[override]
        """Load a tokenizer.json that build_marian_tokenizers made."""
        return cls(read(path), str(path), vocab_size)

    def _read(self, content: Mapping[str, Any]) -> None:
        entries = content["model"]["vocab"]
        parts = content["normalizer"]["normalizers"] if content["normalizer"] else []
        charsmaps = [part["precompiled_charsmap"] for part in parts if part["type"] == "Precompiled"]
        self._charsmap = Charsmap(base64.b64decode(charsmaps[0])) if charsmaps else None
        self._trims = any(part["type"] == "Strip" for part in parts)
        self._prefixes = content["pre_tokenizer"]["prepend_scheme"] == "always"
        self._spellings = [piece.removeprefix(ID_ONLY) for piece, _ in entries if piece[:1] != PIECE_ONLY]
        if any(piece[:1] != PIECE_ONLY for piece, _ in entries[len(self._spellings) :]):
            raise ValueError("an id follows a piece that has none")
        self._unk = operator.index(content["model"]["unk_id"])
        self._silent = {token["content"] for token in content["added_tokens"]}  # special ones and others
        ids = {text: index for index, text in enumerate(self._spellings)}
        self._special_tokens = {text: ids.pop(text) for text in self._special}
        self._ids = ids
        scored = [(piece.removeprefix(PIECE_ONLY), score) for piece, score in entries if piece[:1] != ID_ONLY]
        self._lattice = Lattice({piece: score for piece, score in scored if piece not in self._silent})
        codes = (text for text in self._ids if text.startswith(">>") and text.endswith("<<"))
        self._codes = tuple(sorted(codes))
        longest_first = sorted(self._special, key=len, reverse=True)
        self._any_special = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    @property
    def language_codes(self) -> tuple[str, ...]:
        """What a text may begin with to choose the language of the translation, such as ``>>de<<``."""
        return self._codes

    def token_id(self, text: str) -> int | None:
        """Return the id of the token spelled ``text`` in the vocabulary, or None."""
        return self._special_tokens.get(text, self._ids.get(text))

    def piece(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of an id, such as ``"▁the"``; None if it decodes to nothing."""
        spelled = self.spelling(token_id)
        return None if not spelled or spelled in self._silent else spelled

    def spelling(self, token_id: int) -> str:
        """Return how the vocabulary spells an id, special tokens too; empty for an id without a token."""
        index = self._check_id(token_id)
        return self._spellings[index] if index < len(self._spellings) else ""

    def spellings(self, ids: Sequence[int]) -> list[str]:
        """Return each id's text for display: ``" the"`` for ``"▁the"``, special tokens as they are."""
        return [self.spelling(token_id).replace(SPACE, " ") for token_id in ids]

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Turn a text into token ids, adding none of its own.

        Args:
            text: Any text. What it begins with is a language code if it looks like ``>>de<<``.
            parse_special: Whether a special token's text, such as ``</s>``, becomes that token; what
                is between two of them is then a text of its own. Leave it off for text that users wrote.

        Raises:
            InputError: ``text`` is no str, holds half of a surrogate pair, or begins with a language
                code that the model does not have though it has others.
        """
        check_text(text)
        parts = self._any_special.split(text) if parse_special else [text]
        ids: list[int] = []
        for index, part in enumerate(parts):
            if index % 2:  # the pattern's one group: every second part is what it matched
                ids.append(self._special_tokens[part])
            else:
                code, rest = self._split_code(part)
                pieces = self._lattice.pieces(self._normalize(rest))
                ids += [*code, *(self._ids.get(piece, self._unk) for piece in pieces)]
        return ids

    def encode_batch(
        self, texts: Sequence[str], parse_special: bool = False, first_index: int = 0
    ) -> NoReturn:
        """Refuse every call: these tokens have no places in the text."""
        raise InputError(f"{self._source} keeps no places in the text; use encode and spellings instead")

    def decode(self, ids: Sequence[int]) -> str:
        """Turn token ids into text; special tokens and unassigned ids add nothing.

        White space at both ends is left out.
        """
        return "".join(map(self.text_of, ids)).strip()

    def text_of(self, token_id: int) -> str:
        """Return what one id adds to a text, before `decode` trims it."""
        return (self.piece(token_id) or "").replace(SPACE, " ")

    def stream(self) -> TextStream:
        """Return a new decoder for ids that come one at a time."""
        return _PieceStream(self)

    def _split_code(self, text: str) -> tuple[list[int], str]:
        """Return the id of the language code that a text begins with, and the rest of it."""
        end = text.find("<<") + 2
        if not text.startswith(">>") or end < 2:
            return [], text
        code = text[:end]
        if code not in self._ids and self._codes:
            more = ", ..." if len(self._codes) > CODES_SHOWN else ""
            raise InputError(
                f"the text begins with {code!r}, which is none of the model's language codes: "
                f"{', '.join(self._codes[:CODES_SHOWN])}{more}; to translate these letters, "
                "put a space before them"
            )
        return [self._ids.get(code, self._unk)], text[end:]

    def _normalize(self, text: str) -> str:
        """Return the text as SentencePiece cuts it: characters mapped, spaces spelled as in pieces."""
        if not text:
            return ""
        parts = [SPACE] if self._prefixes else []
        after_space = self._trims
        for part in self._charsmap.map_text(text) if self._charsmap else text:
            kept = part.lstrip(" ") if after_space else part
            if kept:
                parts.append(kept)
                after_space = self._trims and kept.endswith(" ")
        joined = "".join(parts).replace(" ", SPACE)
        return joined.rstrip(SPACE) if self._trims else joined


class Charsmap:
    """SentencePiece's normalization rules: the longest rule that fits replaces what it fits.

    Args:
        data: A double array of 32-bit units (darts-clone), its size before it, and the replacements
            after it, each ended by a zero byte.

    Raises:
        ValueError: The data is cut off.
    """

    def __init__(self, data: bytes) -> None:
        if len(data) < 4:
            raise ValueError("a charsmap without a size")
        (size,) = struct.unpack_from("<I", data)
        if size % 4 or not 0 < size <= len(data) - 4:
            raise ValueError("a charsmap that is cut off")
        self._units = struct.unpack_from(f"<{size // 4}I", data, 4)
        self._replacements = data[4 + size :]

    def map_text(self, text: str) -> Iterator[str]:
        """Yield the text in parts, each a rule's replacement or one character that no rule fits."""
        data = text.encode()
        at = 0
        while at < len(data):
            length, offset = self._longest(data, at)
            if length:
                end = self._replacements.find(b"\0", offset)
                yield self._replacements[offset : end if end >= 0 else None].decode(errors="replace")
            else:
                length = _length_of_character(data[at])
                yield data[at : at + length].decode(errors="replace")
            at += length

    def _longest(self, data: bytes, start: int) -> tuple[int, int]:
        """Return how many bytes the longest rule fits, and where its replacement begins; 0 for none."""
        units = self._units
        length = offset = 0
        node = _step(units[0])
        for index in range(start, len(data)):
            node ^= data[index]
            if node >= len(units) or units[node] & 0x800000FF != data[index]:
                break
            unit = units[node]
            node ^= _step(unit)
            if unit >> 8 & 1 and node < len(units):
                length = index + 1 - start
                offset = units[node] & 0x7FFFFFFF
        return length, offset


class Lattice:
    """Cuts a text into the pieces whose scores have the highest sum, as SentencePiece's unigram model.

    Args:
        scores: The score of each piece.

    Raises:
        ValueError: There are no pieces.
    """

    def __init__(self, scores: Mapping[str, float]) -> None:
        self._unknown = _single(min(scores.values()) - 10)
        # Beginnings of pieces have a score that never wins, and end the search where they are absent.
        self._scores = {piece[:end]: -math.inf for piece in scores for end in range(1, len(piece))}
        self._scores.update(scores)

    def pieces(self, text: str) -> list[str]:
        """Return the pieces of a text; unknown characters in a row are one piece."""
        scores = self._scores
        size = len(text)
        best = array("f", [-math.inf]) * (size + 1)  # of single precision, as ties depend on it
        best[0] = 0
        starts = [0] * (size + 1)
        for start in range(size):
            here = best[start]
            for end in range(start + 1, size + 1):
                score = scores.get(text[start:end])
                if score is None:
                    break
                total = score + here
                if total > best[end] and _single(total) > best[end]:
                    best[end], starts[end] = total, start
            if self._is_unknown(text[start]) and _single(self._unknown + here) > best[start + 1]:
                best[start + 1], starts[start + 1] = self._unknown + here, start
        return self._cut(text, starts)

    def _cut(self, text: str, starts: Sequence[int]) -> list[str]:
        cuts = [len(text)]
        joins = False
        end = len(text)
        while end:
            start = starts[end]
            unknown = self._is_unknown(text[start:end])
            if unknown and joins:
                cuts[-1] = start
            else:
                cuts.append(start)
            end = start
            joins = unknown
        cuts.reverse()
        return [text[start:end] for start, end in itertools.pairwise(cuts)]

    def _is_unknown(self, piece: str) -> bool:
        return self._scores.get(piece, -math.inf) == -math.inf


class _PieceStream(TextStream):
    """Gives what `PieceTokenizer.decode` gives: white space waits until something follows it."""

    def __init__(self, tokenizer: PieceTokenizer) -> None:
        super().__init__(tokenizer)
        self._pieces = tokenizer
        self._begun = False
        self._space = ""

    def push(self, token_id: int) -> str:
        text = self._space + self._pieces.text_of(token_id)
        shown = text.rstrip()
        if not shown:
            self._space = text if self._begun else ""
            return ""
        self._space = text[len(shown) :]
        shown = shown if self._begun else shown.lstrip()
        self._begun = True
        return shown

    def finish(self) -> str:
        return ""


def _step(unit: int) -> int:
    """Return how far a unit of a double array is from its children."""
    return (unit >> 10) << ((unit & 0x200) >> 6)


def _length_of_character(first_byte: int) -> int:
    if first_byte < 0x80:
        return 1
    if first_byte < 0xE0:
        return 2
    return 3 if first_byte < 0xF0 else 4


def _single(value: float) -> float:
    """Round to single precision."""
    return array("f", [value])[0]
