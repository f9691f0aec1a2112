"""Text as it arrives: pieces that never end within a character, and stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from ..errors import InputError

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not UTF-8, or not yet


class Pieces(Protocol):
    """What decoding reads of a `Tokenizer`."""

    byte_level: bool
    byte_fallback: bool

    def find_piece(self, token_id: int) -> str | None: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class IncrementalDecoder:
    """Turns token ids, one at a time, into the text they add.

    The pieces joined are exactly ``tokenizer.decode(all ids)``, and no piece ends within a UTF-8
    character: bytes wait until the character is whole or cannot become one. Ids that go on with a text
    keep the space before the first word: `context` is what ``tokenizer.find_context`` says of that text.

    Not ``tokenizers.decoders.DecodeStream``: that one has no end, so what it still holds when
    generation stops is lost, and it holds back a genuine U+FFFD.
    """

    def __init__(self, tokenizer: Pieces, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._shown = list(context)  # the ids shown last: the next ones' spaces depend on them
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain, which may be none."""
        piece = self._tokenizer.find_piece(token_id)
        if piece is None:
            return ""
        if self._tokenizer.byte_level:
            return self._utf8.decode(encode_piece(piece))
        self._held.append(token_id)
        if self._tokenizer.byte_fallback and is_byte(piece):
            return ""  # one bad byte spoils its whole run of byte tokens, so the run stays whole
        return self._release(final=False)

    def finish(self) -> str:
        """Give what was still held; an unfinished character becomes U+FFFD, as in ``decode``."""
        return self._utf8.decode(b"", final=True) + self._release(final=True)

    def release_bytes(self) -> str:
        """Give what is held of bytes that are whole characters by now, without waiting for those behind."""
        return self._release(final=False) if self._held else ""

    def _release(self, *, final: bool) -> str:
        text = self._tokenizer.decode(self._shown + self._held)
        if text.endswith(REPLACEMENT) and not final:
            return ""
        before = self._tokenizer.decode(self._shown)
        self._shown = self._held
        self._held = []
        return text.removeprefix(before)


class StopStrings:
    """Cuts a text that comes in pieces at the first stop string.

    First is the one whose last character arrives first; of two that end together, the longer.
    So the result does not depend on how the text was split, and nothing after the end of a stop
    string has to be generated to know it. What could be the beginning of one is held back.

    Special tokens are searched as they are spelled, in the middle of the text, but never shown.
    """

    def __init__(self, stop: str | Sequence[str] | None) -> None:
        strings: Sequence[str] = () if stop is None else stop
        if isinstance(stop, str):
            strings = [stop]
        if not isinstance(strings, Sequence) or not all(isinstance(string, str) for string in strings):
            raise InputError(
                f"stop is {stop!r}; it must be a string, a list of strings, or None", option="stop"
            )
        if "" in strings:
            raise InputError(
                "stop contains an empty string, which every text begins with; remove it, "
                "or pass stop=None to stop at no string",
                option="stop",
            )
        self._strings = tuple(strings)
        self._held = ""
        self._hidden: list[tuple[int, int]] = []  # where special tokens are in what is held
        self.found: str | None = None  # the one that ended the text

    def push(self, piece: str, *, hidden: bool = False) -> str:
        """Take the next piece of text, or a special token, which is hidden.

        Returns what may be shown, nothing once a stop string was found.
        """
        if not self._strings:
            return "" if hidden else piece
        if self.found is not None:
            return ""
        text = self._held + piece
        if hidden:
            self._hidden.append((len(self._held), len(text)))
        starts = {string: text.find(string) for string in self._strings}
        matches = [(at + len(string), at) for string, at in starts.items() if at >= 0]
        if matches:
            end, start = min(matches)
            self.found = text[start:end]
            return self._show(text, start)
        return self._show(text, len(text) - max(count_overlap(text, string) for string in self._strings))

    def finish(self) -> str:
        """Give what was held back: the text ended before it became a stop string."""
        return "" if self.found is not None else self._show(self._held, len(self._held))

    def _show(self, text: str, end: int) -> str:
        """Return the text up to a place, without special tokens; hold the rest."""
        shown = text[:end]
        for start, stop in reversed(self._hidden):
            shown = shown[:start] + shown[stop:]
        self._hidden = [(max(start - end, 0), stop - end) for start, stop in self._hidden if stop > end]
        self._held = text[end:]
        return shown


def encode_piece(piece: str) -> bytes:
    """Return the bytes that a byte-level vocabulary spells as ``piece``.

    An added token that has a character outside the byte alphabet stands for itself.
    """
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def _make_byte_alphabet() -> dict[str, int]:
    """Return GPT-2's spelling of bytes: printable bytes are themselves, the others U+0100 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _make_byte_alphabet()


def is_byte(piece: str) -> bool:
    """Return whether a vocabulary with byte fallback spells a byte as ``piece``, such as ``<0xE2>``."""
    return len(piece) == len("<0x00>") and piece.startswith("<0x") and piece.endswith(">")


def count_overlap(text: str, string: str) -> int:
    """Return how many characters at the end of ``text`` could begin ``string``."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
