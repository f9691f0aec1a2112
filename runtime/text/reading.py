"""How texts and pairs are read: some ahead at a time, each checked when it is read; results in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from ..errors import ContextLengthError, InputError
from ..option_checks import check_not_pair
from ..progress import Progress

READ_AHEAD = 1024  # texts that are sorted by length together
READ_AHEAD_BATCHES = 8  # or fewer, where a caller says how many run together
READ_AHEAD_CHARACTERS = 200_000  # or fewer texts that together have so many: their outputs are held
STEP_CHARACTERS = 50_000  # that are tokenized before something else may have its turn
Item: TypeAlias = str | tuple[str, str]  # a text, or a pair

R = TypeVar("R")
T = TypeVar("T")
ItemT = TypeVar("ItemT", bound=Item)


def count_read_ahead(batch_size: int | None) -> int:
    """Return how many texts are read at a time: with batches of one, one, as somebody may wait for it."""
    if batch_size is None:
        return READ_AHEAD
    return 1 if batch_size == 1 else min(READ_AHEAD, READ_AHEAD_BATCHES * batch_size)


def split_into_chunks(
    items: Iterable[ItemT], most: int, max_characters: int = READ_AHEAD_CHARACTERS
) -> Iterator[list[ItemT]]:
    """Yield the items in lists: at most `most`, or of so many characters together."""
    chunk: list[ItemT] = []
    characters = 0
    for item in items:
        chunk.append(item)
        characters += len(item) if isinstance(item, str) else sum(map(len, item))
        if len(chunk) == most or characters >= max_characters:
            yield chunk
            chunk = []
            characters = 0
    if chunk:
        yield chunk


def run_in_chunks(
    items: Iterable[ItemT],
    most: int,
    progress: Progress,
    run_chunk: Callable[[int, list[ItemT]], Iterable[Mapping[int, R]]],
) -> Iterator[R]:
    """Yield the results of items in order, each as soon as it and those before it are computed.

    `run_chunk` gets the number of a chunk's first item and the chunk, and yields the results of each batch by
    the items' numbers. Progress is reported after each batch.
    """
    waiting: dict[int, R] = {}
    given = 0
    with progress:
        for chunk in split_into_chunks(items, most):
            for batch in run_chunk(given, chunk):
                waiting |= batch
                progress(given + len(waiting))
                while given in waiting:
                    yield waiting.pop(given)
                    given += 1


@contextmanager
def name_item(name: str) -> Iterator[None]:
    """Put the name of one of several texts, such as "texts[2]", before the message of an error about it."""
    try:
        yield
    except ContextLengthError as error:
        raise ContextLengthError(
            f"{name}: {error}", tokens=error.tokens, limit=error.limit, option=find_item_option(error, name)
        ) from error
    except InputError as error:
        raise InputError(f"{name}: {error}", option=find_item_option(error, name)) from error


def find_item_option(error: InputError, name: str) -> str:
    """Return what an error about one of several texts is about: an option, or the text by its name."""
    return name if error.option in (None, "prompt") else error.option


class Pair(tuple[str, str]):
    """One pair that was given as two arguments, unlike a tuple that a caller gave."""


def make_item(first: Any, second: Any, call: str, needs_pair: bool = True) -> Any:
    """Return the pair of two arguments, or the first one alone; errors say by `call` how a pair is given."""
    if second is None:
        if needs_pair and isinstance(first, str):
            raise InputError(f"a pair of two texts is needed: {call}, or a list of pairs [(text, other)]")
        return first
    if not isinstance(first, str) or not isinstance(second, str):
        raise InputError(
            f"{call} takes two texts, not {type(first).__name__} and {type(second).__name__}; give several"
            " pairs as a list of tuples"
        )
    return Pair((first, second))


def run_one_or_all(texts: Any, run: Callable[[Any], Iterator[R]]) -> R | list[R]:
    """Return one result for one text or `Pair`; a list of them for several."""
    if isinstance(texts, str | Pair):
        (result,) = run([texts])  # to its end: there stands what is said of dropped tokens
        return result
    return list(run(texts))


def check_each(items: Any, check: Callable[[Any], T], pair_call: str = "") -> Iterator[T]:
    """Return an iterator over the items, each checked when it is read; refuse one text.

    `pair_call` is how to pass one pair to the method that was called, if it takes pairs.
    """
    if isinstance(items, str | bytes) or not hasattr(items, "__iter__"):
        raise InputError(f"give several texts, such as a list of str, not {type(items).__name__}")
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
        raise InputError(
            f"a text must be a str, and a pair of two texts a tuple of two str, not {item!r:.80}"
        )
    return check_pair(item)


def check_pair(item: Any) -> tuple[str, str]:
    if not isinstance(item, tuple | list) or len(item) != 2 or not all(isinstance(t, str) for t in item):
        raise InputError(f"a pair of two texts must be a tuple of two str, not {item!r:.80}")
    return item[0], item[1]
