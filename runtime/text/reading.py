"""How an encoder's tasks read texts and pairs: some ahead at a time, each checked when it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ..errors import InputError
from ..options import EncoderOptions, Truncation, check_batch_size, check_choice, check_not_pair
from ..progress import Progress
from .long_text import TRUNCATIONS

READ_AHEAD = 1024  # texts that are sorted by length together
READ_AHEAD_BATCHES = 8  # or fewer, where a caller says how many run together
READ_AHEAD_CHARACTERS = 200_000  # or fewer texts that together have so many: their outputs are held
Item: TypeAlias = str | tuple[str, str]  # a text, or a pair

T = TypeVar("T")
ItemT = TypeVar("ItemT", bound=Item)


@dataclass(frozen=True)
class Reading:
    """How texts become sequences, and how those run; the options that all tasks share.

    Attributes:
        truncation: of a text that is longer than the model; None refuses it.
        stride: tokens that neighbouring windows share; None: a quarter of the model's length.
        parse_special: whether a special token's text, such as [SEP], becomes that token.
        batch_size: the most sequences that run together.
        read_ahead: the most texts that are read before the first of them is done.
        progress: reports the number of texts that are done.
    """

    truncation: Truncation
    stride: int | None
    parse_special: bool
    batch_size: int
    read_ahead: int
    progress: Progress

    @staticmethod
    def of(options: EncoderOptions, *, truncation: Truncation, max_batch: int) -> Reading:
        """Check the options of a call; `truncation` is what the task does unless told otherwise."""
        truncation = options.get("truncation", truncation)
        check_choice("truncation", truncation, (None, *TRUNCATIONS))
        stride = options.get("stride")
        if stride is not None and (type(stride) is not int or stride < 0):
            raise InputError(f"stride={stride!r} must be None or a whole number from 0")
        return Reading(
            truncation=truncation,
            stride=stride,
            parse_special=options.get("parse_special", False),
            batch_size=check_batch_size(options.get("batch_size"), max_batch),
            read_ahead=read_ahead(options.get("batch_size")),
            progress=Progress(options.get("progress", False)),
        )


def read_ahead(batch_size: int | None) -> int:
    """Return how many texts are read at a time: with batches of one, one, as somebody may wait for it."""
    if batch_size is None:
        return READ_AHEAD
    return 1 if batch_size == 1 else min(READ_AHEAD, READ_AHEAD_BATCHES * batch_size)


def chunks(items: Iterable[ItemT], most: int) -> Iterator[list[ItemT]]:
    """Yield the items in lists: at most `most`, or of `READ_AHEAD_CHARACTERS` together."""
    chunk: list[ItemT] = []
    characters = 0
    for item in items:
        chunk.append(item)
        characters += len(item) if isinstance(item, str) else sum(map(len, item))
        if len(chunk) == most or characters >= READ_AHEAD_CHARACTERS:
            yield chunk
            chunk = []
            characters = 0
    if chunk:
        yield chunk


def check_each(items: Any, check: Callable[[Any], T], pair_call: str = "") -> Iterator[T]:
    """Return an iterator over the items, each checked when it is read.

    Args:
        items: what a caller gave for several texts or pairs.
        check: returns an item, or raises.
        pair_call: how to pass one pair to the method that was called, if it takes pairs.

    Raises:
        InputError: one text, whose letters would else be taken for texts, two texts that could be a pair,
            or nothing to iterate over.
    """
    if isinstance(items, str | bytes) or not hasattr(items, "__iter__"):
        raise InputError(f"several texts are needed here, such as a list of str, not {type(items).__name__}")
    check_not_pair(items, pair_call)
    return map(check, items)


def check_text(text: Any) -> str:
    if not isinstance(text, str):
        raise InputError(f"a text must be a str, not {type(text).__name__}")
    return text


def check_item(item: Any) -> Item:
    if isinstance(item, str):
        return item
    if not isinstance(item, tuple | list):
        raise InputError(f"a text, which is a str, or a pair of two texts is needed, not {item!r:.80}")
    return check_pair(item)


def check_pair(item: Any) -> tuple[str, str]:
    if not isinstance(item, tuple | list) or len(item) != 2 or not all(isinstance(t, str) for t in item):
        raise InputError(f"a pair of two texts is needed, a tuple of two str, not {item!r:.80}")
    return item[0], item[1]
