"""How an encoder's tasks read texts and pairs: some ahead at a time, each checked when it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ..errors import InputError
from ..text.long_text import TRUNCATIONS

READ_AHEAD = 1024  # texts that are sorted by length together
READ_AHEAD_CHARACTERS = 200_000  # or fewer texts that together have so many: their outputs are held
Item: TypeAlias = str | tuple[str, str]  # a text, or a pair

T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """How texts become sequences; the options that all tasks share.

    Attributes:
        truncation: of a text that is longer than the model: "head", "tail", "head+tail" or "windows".
        stride: tokens that neighbouring windows share; None: a quarter of the model's length.
        parse_special: whether a special token's text, such as [SEP], becomes that token.
        progress: called with the number of texts that are done.
    """

    truncation: str
    stride: int | None = None
    parse_special: bool = False
    progress: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if self.truncation not in TRUNCATIONS:
            allowed = ", ".join(map(repr, TRUNCATIONS))
            raise InputError(f"truncation={self.truncation!r} is not one of {allowed}")
        if self.stride is not None and (type(self.stride) is not int or self.stride < 0):
            raise InputError(f"stride={self.stride!r} must be None or a whole number from 0")


def chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    """The items, `READ_AHEAD` or `READ_AHEAD_CHARACTERS` of them at a time."""
    chunk: list[Item] = []
    characters = 0
    for item in items:
        chunk.append(item)
        characters += len(item) if isinstance(item, str) else sum(map(len, item))
        if len(chunk) == READ_AHEAD or characters >= READ_AHEAD_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def checked(items: Any, check: Callable[[Any], T]) -> Iterator[T]:
    """Each item, checked when it is read.

    Raises:
        InputError: one text, whose letters would else be taken for texts, or nothing to iterate over.
    """
    if isinstance(items, str) or not hasattr(items, "__iter__"):
        raise InputError(f"several texts are needed here, such as a list of str, not {type(items).__name__}")
    return map(check, items)


def check_text(text: Any) -> str:
    if not isinstance(text, str):
        raise InputError(f"a text must be a str, not {type(text).__name__}")
    return text


def check_item(item: Any) -> Item:
    return item if isinstance(item, str) else check_pair(item)


def check_pair(item: Any) -> tuple[str, str]:
    if not isinstance(item, tuple | list) or len(item) != 2 or not all(isinstance(t, str) for t in item):
        raise InputError(f"a pair of two texts is needed, not {item!r:.80}")
    return item[0], item[1]
