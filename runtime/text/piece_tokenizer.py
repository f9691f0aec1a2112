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
from typing import Any, NoReturn

from ..errors import InputError, ManifestError, TokenizerError
from .stream import IncrementalDecoder
from .tokenizer import Tokenizer, check_text

# What the exporter writes before an entry's spelling. tokenizers' Unigram needs one list for two things:
ID_ONLY = "\U0010ffff"  # the vocabulary has it, this language's pieces do not: no text is cut into it
PIECE_ONLY = "\U0010fffe"  # texts are cut into it, the vocabulary lacks it: it becomes the unknown token

PLAIN = "plain"  # the kind of a tokenizer.json as it is; SentencePiece with another's numbering
PIECES = "pieces"
SPACE = "▁"  # how pieces spell a space
CODES_SHOWN = 20


class PieceTokenizer(Tokenizer):
    """One language's side of a MarianMT tokenizer; safe to use from several threads.

    Gives the ids of transformers' MarianTokenizer. SentencePiece is computed here: tokenizers'
    Precompiled replaces whole graphemes, and its Unigram adds scores in another precision, so that a
    few texts, such as a row of dots, would come out otherwise. The exporter's build_marian_tokenizers writes
    the tokenizer.json; `vocab_size` is the model's.
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
        self.vocab_size = vocab_size

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
        self.language_codes = tuple(sorted(codes))
        longest_first = sorted(self._special, key=len, reverse=True)
        self._any_special = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def find_id(self, text: str) -> int | None:
        return self._special_tokens.get(text, self._ids.get(text))

    def find_piece(self, token_id: int) -> str | None:
        spelled = self.spell(token_id)
        return None if not spelled or spelled in self._silent else spelled

    def spell(self, token_id: int) -> str:
        index = self._check_id(token_id)
        return self._spellings[index] if index < len(self._spellings) else ""

    def find_bytes(self, token_id: int, *, begins: bool = False) -> bytes:
        text = self.decode_one(token_id)
        return (text.lstrip() if begins else text).encode()

    def spell_all(self, ids: Sequence[int]) -> list[str]:
        """Return the spelling of each id, to be shown: ``" the"`` for ``"▁the"``."""
        return [self.spell(token_id).replace(SPACE, " ") for token_id in ids]

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Turn a text into token ids; what it begins with is a language code if it looks like ``>>de<<``.

        With `parse_special` what is between two special tokens is a text of its own.
        """
        return [token_id for token_id, _ in self._cut(text, parse_special)]

    def find_unknown(self, text: str, parse_special: bool = False) -> list[str]:
        pieces = (piece for token_id, piece in self._cut(text, parse_special) if token_id == self._unk)
        return [piece.replace(SPACE, " ").strip() or " " for piece in pieces]

    def _cut(self, text: str, parse_special: bool) -> list[tuple[int, str]]:
        """Return a text's tokens, each with what it stands for."""
        check_text(text)
        parts = self._any_special.split(text) if parse_special else [text]
        tokens: list[tuple[int, str]] = []
        for index, part in enumerate(parts):
            if index % 2:  # the pattern's one group: every second part is what it matched
                tokens.append((self._special_tokens[part], part))
            else:
                code, rest = self._split_code(part)
                pieces = self._lattice.cut(self._normalize(rest))
                tokens += [(token_id, part.removesuffix(rest)) for token_id in code]
                tokens += [(self._ids.get(piece, self._unk), piece) for piece in pieces]
        return tokens

    def encode_batch(
        self, texts: Sequence[str], parse_special: bool = False, first_index: int = 0
    ) -> NoReturn:
        """Refuse every call: these tokens have no places in the text."""
        raise InputError(
            f"{self._source} does not record where tokens are in the text; use encode and spell_all instead"
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Turn token ids into text without white space at both ends; special tokens add nothing."""
        return "".join(map(self.decode_one, ids)).strip()

    def decode_one(self, token_id: int) -> str:
        """Return what one id adds to a text, before `decode` trims it."""
        return (self.find_piece(token_id) or "").replace(SPACE, " ")

    def stream(self, context: Sequence[int] = ()) -> IncrementalDecoder:
        assert not context, "a translation goes on with no text"
        return _PieceStream(self)

    def _split_code(self, text: str) -> tuple[list[int], str]:
        """Return the id of the language code that a text begins with, and the rest of it."""
        end = text.find("<<") + 2
        if not text.startswith(">>") or end < 2:
            return [], text
        code = text[:end]
        if code not in self._ids and self.language_codes:
            more = ", ..." if len(self.language_codes) > CODES_SHOWN else ""
            raise InputError(
                f"the text begins with {code!r}, which is not one of the model's language codes: "
                f"{', '.join(self.language_codes[:CODES_SHOWN])}{more}; to translate it as text, "
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

    The data is a double array of 32-bit units (darts-clone), its size before it, and the replacements after
    it, each ended by a zero byte.
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
            length, offset = self._find_longest(data, at)
            if length:
                end = self._replacements.find(b"\0", offset)
                yield self._replacements[offset : end if end >= 0 else None].decode(errors="replace")
            else:
                length = 1 + sum(data[at] >= least for least in (0x80, 0xE0, 0xF0))  # of a UTF-8 character
                yield data[at : at + length].decode(errors="replace")
            at += length

    def _find_longest(self, data: bytes, start: int) -> tuple[int, int]:
        """Return how many bytes the longest rule fits, and where its replacement begins; 0 for none."""
        units = self._units
        length = offset = 0
        node = _find_children(units[0])
        for index in range(start, len(data)):
            node ^= data[index]
            if node >= len(units) or units[node] & 0x800000FF != data[index]:
                break
            unit = units[node]
            node ^= _find_children(unit)
            if unit >> 8 & 1 and node < len(units):
                length = index + 1 - start
                offset = units[node] & 0x7FFFFFFF
        return length, offset


class Lattice:
    """Cuts a text into the pieces whose scores have the highest sum, as SentencePiece's unigram model."""

    def __init__(self, scores: Mapping[str, float]) -> None:
        self._unknown = _round_to_single(min(scores.values()) - 10)
        # Beginnings of pieces have a score that never wins, and end the search where they are absent.
        self._scores = {piece[:end]: -math.inf for piece in scores for end in range(1, len(piece))}
        self._scores.update(scores)

    def cut(self, text: str) -> list[str]:
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
                if total > best[end] and _round_to_single(total) > best[end]:
                    best[end] = total
                    starts[end] = start
            if self._is_unknown(text[start]) and _round_to_single(self._unknown + here) > best[start + 1]:
                best[start + 1] = self._unknown + here
                starts[start + 1] = start
        return self._trace_back(text, starts)

    def _trace_back(self, text: str, starts: Sequence[int]) -> list[str]:
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


class _PieceStream(IncrementalDecoder):
    """Gives what `PieceTokenizer.decode` gives: white space waits until something follows it."""

    def __init__(self, tokenizer: PieceTokenizer) -> None:
        super().__init__(tokenizer)
        self._pieces = tokenizer
        self._begun = False
        self._space = ""

    def push(self, token_id: int) -> str:
        text = self._space + self._pieces.decode_one(token_id)
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


def _find_children(unit: int) -> int:
    """Return how far a unit of a double array is from its children."""
    return (unit >> 10) << ((unit & 0x200) >> 6)


def _round_to_single(value: float) -> float:
    """Round to single precision."""
    return array("f", [value])[0]


def open_tokenizer(data: bytes, source: str, kind: str, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of one kind for a tokenizer.json, which errors call `source`."""
    if kind not in (PLAIN, PIECES):
        raise ManifestError(f"{source}: its kind {kind!r} is not one of {PLAIN}, {PIECES}")
    return Tokenizer(data, source) if kind == PLAIN else PieceTokenizer(data, source, vocab_size)
