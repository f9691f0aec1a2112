"""Fits texts that are longer than the model: by truncation, or in windows.

M is the room for text in one sequence: the model's length without the special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..bundle.defaults import SpecialTokens
from ..errors import ContextLengthError, InputError

TRUNCATIONS = ("head", "tail", "head+tail", "windows")


@dataclass(frozen=True)
class Piece:
    """One sequence for an encoder: [CLS] first [SEP], or [CLS] first [SEP] second [SEP].

    `first` and `second` say which tokens of the two texts it holds, in order: first[k] stands at position
    prefix + k, second[k] at prefix + len(first) + separators + k.
    """

    ids: list[int]
    segments: list[int]  # 0 for the first text, and 1 for the second where the model tells the two apart
    first: Sequence[int]
    second: Sequence[int] | None  # None without a second text
    separators: int = 1  # [SEP] between the two; RoBERTa has two
    prefix: int = 1  # [CLS]; a model without special tokens has none
    unpooled: int = 0  # tokens at the beginning that are no part of a text's vector: a prompt's
    unseen: int = 0  # tokens at the end that no token attends to

    def __len__(self) -> int:
        return len(self.ids)

    def leave_out_prompt(self, tokens: int) -> Piece:
        """Return the sequence with [CLS] and the first `tokens` of its text left out of its vector."""
        unpooled = self.prefix + sum(token < tokens for token in self.first)
        return replace(self, unpooled=unpooled if unpooled < len(self) else 0)

    def expand(self, length: int, token: int, attend: bool) -> Piece:
        """Return the sequence with so many tokens, by one that is put behind it; others may attend to it."""
        missing = max(0, length - len(self))
        ids = [*self.ids, *[token] * missing]
        segments = [*self.segments, *[0] * missing]
        return replace(self, ids=ids, segments=segments, unseen=0 if attend else missing)

    @property
    def body(self) -> tuple[int, Sequence[int]]:
        """The text that windows slide over, the second if there is one: its position, and its tokens."""
        if self.second is None:
            return self.prefix, self.first
        return self.prefix + len(self.first) + self.separators, self.second


@dataclass(frozen=True)
class FittedText:
    """A text, or a pair, as sequences that the model can take: one, or several overlapping windows."""

    pieces: tuple[Piece, ...]
    dropped: int  # tokens of the text that are in none of them


def fit(
    first: Sequence[int],
    second: Sequence[int] | None,
    *,
    max_length: int,
    special_tokens: SpecialTokens,
    truncation: str | None,
    stride: int | None = None,
) -> FittedText:
    """Make sequences of at most `max_length` tokens, special ones included, of a text's tokens or a pair's.

    Truncation "head" keeps the beginning, of a pair it shortens the longer text; "tail" keeps the end;
    "head+tail" both (Sun et al., 2019); "windows" keeps all of it in sequences that overlap by `stride`
    tokens, of a pair all of the second. None refuses what is too long.
    """
    special = len(special_tokens.prefix) + len(special_tokens.between) + len(special_tokens.suffix)
    M = max_length - special
    long = len(first) + (0 if second is None else len(second))
    if long + special == 0:
        raise InputError("the text is empty: it has no tokens, and this model's tokenizer adds none")
    kept: list[tuple[Sequence[int], Sequence[int] | None]]
    if long > M and truncation is None:
        what = "the text has" if second is None else "the two texts have"
        raise ContextLengthError(
            f"{what} {long + special} tokens, special ones included; the model takes {max_length}."
            f" Shorten what is given, or choose a truncation: {', '.join(map(repr, TRUNCATIONS))}",
            tokens=long + special,
            limit=max_length,
        )
    if long > M and truncation == "windows":
        room = M if second is None else leave_room(first, M, long)
        parts = split_windows(long if second is None else len(second), room, stride, max_length)
        kept = [(part, None) if second is None else (range(len(first)), part) for part in parts]
    else:
        rooms = share_room(len(first), 0 if second is None else len(second), M)
        of_second = None if second is None else keep_tokens(len(second), rooms[1], truncation)
        kept = [(keep_tokens(len(first), rooms[0], truncation), of_second)]
    pieces = tuple(build_piece(first, second, a, b, special_tokens) for a, b in kept)
    dropped = 0 if len(pieces) > 1 else long - (len(pieces[0]) - special)
    return FittedText(pieces, dropped)


def build_piece(
    first: Sequence[int],
    second: Sequence[int] | None,
    of_first: Sequence[int],
    of_second: Sequence[int] | None,
    special_tokens: SpecialTokens,
) -> Piece:
    """Return a sequence of some tokens of a text, or of a pair."""
    ids = [*special_tokens.prefix, *(first[i] for i in of_first)]
    ids += special_tokens.suffix if of_second is None else special_tokens.between
    segments = [0] * len(ids)
    if second is not None and of_second is not None:
        ids += [*(second[i] for i in of_second), *special_tokens.suffix]
        segments += [special_tokens.second_segment] * (len(ids) - len(segments))
    return Piece(ids, segments, of_first, of_second, len(special_tokens.between), len(special_tokens.prefix))


def keep_tokens(length: int, room: int, truncation: str | None) -> Sequence[int]:
    """Return the tokens of one text that are kept."""
    if length <= room:
        return range(length)
    if truncation == "head":
        return range(room)
    if truncation == "tail":
        return range(length - room, length)
    # Of 510 tokens: 128 and 382 up to 800 tokens, 256 and 254 beyond.
    head = room * (128 if length <= 800 else 256) // 510
    return [*range(head), *range(length - (room - head), length)]


def share_room(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens each text of a pair keeps when the longer one is shortened first."""
    short = min(first, second, room // 2)
    return (short, room - short) if first <= second else (room - short, short)


def leave_room(first: Sequence[int], room: int, length: int) -> int:
    """Return the room that a pair's first text leaves for windows over the second: at least half."""
    if len(first) > room // 2:
        raise ContextLengthError(
            f"the first text (the question or query) has {len(first)} tokens; with truncation='windows' it"
            f" may have {room // 2}. Shorten it, or use truncation='head'",
            tokens=length,
            limit=room,
            option="first",
        )
    return room - len(first)


def split_windows(length: int, room: int, stride: int | None, max_length: int) -> list[range]:
    """Return overlapping ranges over `length` tokens; the last one ends where the text does."""
    if stride is None:
        stride = min(max_length // 4, room - 1)
    if not 0 <= stride < room:
        raise InputError(
            f"stride={stride!r} must be from 0 to {room - 1}, the tokens by which windows overlap",
            option="stride",
        )
    starts = [*range(0, length - room, room - stride), length - room]
    return [range(start, start + room) for start in starts]


def place_tokens(pieces: Sequence[Piece], length: int) -> list[tuple[int, int]]:
    """Return for each token of a text in windows the place where it has most context on both sides.

    A place is the index of the piece and the position in it; (-1, -1) for a dropped token.
    """
    best = [(-1, -1)] * length
    context = [-1] * length
    for index, piece in enumerate(pieces):
        start, body = piece.body
        for k, token in enumerate(body):
            around = min(k, len(body) - 1 - k)
            if around > context[token]:
                best[token] = (index, start + k)
                context[token] = around
    return best
