"""Fits texts that are longer than the model: by truncation, or in windows.

M is the room for text in one sequence: the model's length without the special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ContextLengthError, InputError

SPECIAL_TOKENS = 2  # [CLS] and [SEP] of one text
TRUNCATIONS = ("head", "tail", "head+tail", "windows")


@dataclass(frozen=True)
class Piece:
    """One sequence for an encoder: [CLS] first [SEP], or [CLS] first [SEP] second [SEP].

    Between two texts RoBERTa has two separators.

    Attributes:
        ids: token ids, special ones included.
        segments: 0 for the first text, 1 for the second.
        first: which tokens of the first text it holds, in order; first[k] stands at position 1 + k.
        second: the same of the second text, from position 1 + len(first) + separators on; None without one.
        separators: [SEP] between the two.
    """

    ids: list[int]
    segments: list[int]
    first: Sequence[int]
    second: Sequence[int] | None
    separators: int = 1

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def body(self) -> tuple[int, Sequence[int]]:
        """The text that windows slide over, the second if there is one: its position, and its tokens."""
        if self.second is None:
            return 1, self.first
        return 1 + len(self.first) + self.separators, self.second


@dataclass(frozen=True)
class FittedText:
    """A text, or a pair, as sequences that the model can take.

    Attributes:
        pieces: one, or several overlapping windows.
        dropped: tokens of the text that are in none of them.
    """

    pieces: tuple[Piece, ...]
    dropped: int


def fit(
    first: Sequence[int],
    second: Sequence[int] | None,
    *,
    max_length: int,
    tokens: Mapping[str, int],
    truncation: str | None,
    stride: int | None = None,
    separators: int = 1,
) -> FittedText:
    """Make sequences of at most `max_length` tokens.

    Args:
        first: token ids of a text.
        second: token ids of its pair.
        max_length: special tokens included.
        tokens: the ids of "cls" and "sep".
        truncation: one of `TRUNCATIONS`. "head" keeps the beginning, of a pair it shortens the longer
            text; "tail" keeps the end; "head+tail" both (Sun et al., 2019); "windows" keeps all of it in
            sequences that overlap, of a pair all of the second. None refuses what is too long.
        stride: tokens that neighbouring windows share; a quarter of `max_length` unless given.
        separators: between the texts of a pair.

    Raises:
        InputError: no such truncation or stride.
        ContextLengthError: the text is too long and truncation is None, or windows have no room beside the
            first text of a pair.
    """
    if truncation is not None and truncation not in TRUNCATIONS:
        raise InputError(f"truncation={truncation!r} is not one of {', '.join(map(repr, TRUNCATIONS))}")
    special = SPECIAL_TOKENS if second is None else SPECIAL_TOKENS + separators
    M = max_length - special
    long = len(first) + (0 if second is None else len(second))
    kept: list[tuple[Sequence[int], Sequence[int] | None]]
    if long <= M:
        kept = [(range(len(first)), None if second is None else range(len(second)))]
    elif truncation is None:
        what = "the text has" if second is None else "the two texts have"
        raise ContextLengthError(
            f"{what} {long + special} tokens, special ones included; the model takes {max_length}."
            f" Shorten what is given, or choose a truncation: {', '.join(map(repr, TRUNCATIONS))}",
            tokens=long + special,
            limit=max_length,
        )
    elif truncation == "windows":
        room = M if second is None else room_beside(first, M, long)
        parts = windows(long if second is None else len(second), room, stride, max_length)
        kept = [(part, None) if second is None else (range(len(first)), part) for part in parts]
    elif second is None:
        kept = [(keep_tokens(len(first), M, truncation), None)]
    else:
        rooms = share_room(len(first), len(second), M)
        kept = [
            (keep_tokens(len(first), rooms[0], truncation), keep_tokens(len(second), rooms[1], truncation))
        ]
    pieces = tuple(build_piece(first, second, a, b, tokens, separators) for a, b in kept)
    dropped = 0 if len(pieces) > 1 else long - (len(pieces[0]) - special)
    return FittedText(pieces, dropped)


def build_piece(
    first: Sequence[int],
    second: Sequence[int] | None,
    of_first: Sequence[int],
    of_second: Sequence[int] | None,
    tokens: Mapping[str, int],
    separators: int,
) -> Piece:
    """Return a sequence of some tokens of a text, or of a pair."""
    ids = [tokens["cls"], *(first[i] for i in of_first)]
    ids += [tokens["sep"]] * (1 if of_second is None else separators)
    segments = [0] * len(ids)
    if second is not None and of_second is not None:
        ids += [*(second[i] for i in of_second), tokens["sep"]]
        segments += [1] * (len(of_second) + 1)
    return Piece(ids, segments, of_first, of_second, separators)


def keep_tokens(length: int, room: int, truncation: str) -> Sequence[int]:
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


def room_beside(first: Sequence[int], room: int, length: int) -> int:
    """Return the room that a pair's first text leaves for windows over the second: at least half."""
    if len(first) > room // 2:
        raise ContextLengthError(
            f"the first text (the question or query) has {len(first)} tokens; beside windows over the second"
            f" it may have {room // 2}. Shorten it, or use truncation='head'",
            tokens=length,
            limit=room,
        )
    return room - len(first)


def windows(length: int, room: int, stride: int | None, max_length: int) -> list[range]:
    """Return overlapping ranges over `length` tokens; the last one ends where the text does."""
    if stride is None:
        stride = min(max_length // 4, room - 1)
    if not isinstance(stride, int) or isinstance(stride, bool) or not 0 <= stride < room:
        raise InputError(
            f"stride={stride!r} must be from 0 to {room - 1}: tokens that two neighbouring windows share"
        )
    starts = [*range(0, length - room, room - stride), length - room]
    return [range(start, start + room) for start in starts]


def best_window(pieces: Sequence[Piece], length: int) -> list[tuple[int, int]]:
    """Return for each token of a text in windows the place where it has most context on both sides.

    Returns:
        (index of the piece, position in it) per token; (-1, -1) for a dropped one.
    """
    best = [(-1, -1)] * length
    context = [-1] * length
    for index, piece in enumerate(pieces):
        start, body = piece.body
        for k, token in enumerate(body):
            around = min(k, len(body) - 1 - k)
            if around > context[token]:
                best[token], context[token] = (index, start + k), around
    return best
