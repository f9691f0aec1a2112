"""Where the texts of `planforge run` come from: arguments, lines of stdin, or a file of JSON lines."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias, TypeVar

from ...errors import DataError, InputError
from ..encoding import remove_mark
from .console import say

Item: TypeAlias = "str | tuple[str, str]"  # a text, or a pair of them
Result = TypeVar("Result")
# What a line of JSON has, beside keys of the user's own; of a pair in order.
JSON_KEYS = (("text",), ("text", "pair"), ("question", "context"), ("query", "text"))


@dataclass(frozen=True)
class TextSource:
    """The texts of a command."""

    texts: tuple[str, ...]  # its arguments
    file: Path | None  # of JSON lines; "-" is stdin
    # The second text that an option puts beside each, by the option's name; at most one.
    beside: Mapping[str, str]

    def check(self) -> None:
        """Refuse texts from two places."""
        if len(self.beside) > 1:
            raise InputError(f"give only one of {', '.join('--' + name for name in self.beside)}")
        if self.texts and self.file:
            raise InputError("give texts as arguments or with --input, not both")
        if self.beside and self.file:
            raise InputError(
                f"--{next(iter(self.beside))} cannot be used with --input, whose lines have their own pairs"
            )
        if self.file is not None and str(self.file) != "-":
            with open_input(self.file):
                pass  # what is not there is said before a model is loaded

    @property
    def is_read(self) -> bool:
        """Whether the texts are read from stdin or a file, not typed as arguments."""
        return not self.texts

    @property
    def is_typed(self) -> bool:
        """Whether somebody types them into a terminal, and waits for each answer."""
        return not self.texts and self.file is None and sys.stdin.isatty()

    def read_items(self) -> Iterator[Item | None]:
        """Yield texts or pairs as they are read; None for a blank line. Refuse to have none."""
        count = 0
        for item in self._read():
            yield item if item is None else pair_with(item, self.beside)
            count += 1
        if not count:
            raise InputError("there are no texts: give arguments, lines on stdin, or --input FILE")

    def _read(self) -> Iterator[Item | None]:
        if self.texts:
            yield from self.texts
        elif self.file is None:
            if sys.stdin.isatty():
                say("a text a line, end with Ctrl-D")
            for _, line in read_lines(sys.stdin.buffer, "stdin"):
                yield line if line.strip() else None
        else:
            with open_input(self.file) as stream:
                for number, line in read_lines(stream, str(self.file)):
                    yield parse_item(line, f"{self.file}, line {number}") if line.strip() else None


@contextlib.contextmanager
def open_input(path: Path) -> Iterator[IO[bytes]]:
    """Open a file of --input, or stdin for "-"."""
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = path.open("rb")
    except OSError as error:
        raise InputError(f"--input {path} cannot be read: {error.strerror}") from error
    with stream:
        yield stream


def read_lines(stream: IO[bytes], name: str) -> Iterator[tuple[int, str]]:
    """Yield each line, as it comes, without its end, and its number from 1; refuse what is not UTF-8."""
    for number, line in enumerate(stream, 1):
        try:
            if number == 1:
                line = remove_mark(line, name)
            yield number, line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}, line {number} is not UTF-8: byte {error.start + 1} is 0x{line[error.start]:02x};"
                " convert it, for instance with iconv -t UTF-8"
            ) from error


def pair_with(item: Item, beside: Mapping[str, str]) -> Item:
    """Return a text with what an option puts beside it: --pair after it, the others before it."""
    if not beside or not isinstance(item, str):
        return item
    ((name, other),) = beside.items()
    return (item, other) if name == "pair" else (other, item)


def parse_item(line: str, where: str) -> Item:
    """Return the text or pair of one line of JSON."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # the latter: nested thousands deep
        raise DataError(f"{where} is not JSON: {error}") from error
    if isinstance(value, dict):
        given = {key for keys in JSON_KEYS for key in keys if key in value}
        for keys in JSON_KEYS:
            if given == set(keys) and all(isinstance(value[key], str) for key in keys):
                return value[keys[0]] if len(keys) == 1 else (value[keys[0]], value[keys[1]])
    raise DataError(
        f'{where} must be an object with "text", "text" and "pair", "question" and "context", or "query" and'
        f' "text", such as {{"text": "Hello"}}'
    )


def keep_blanks(
    items: Iterator[Item | None], iterate: Callable[[Iterator[Item]], Iterator[Result]]
) -> Iterator[tuple[Item, Result] | None]:
    """Yield each text with its result, and None for a blank line, so that both sides' lines stay together.

    `iterate` computes a result for each text, in order, reading ahead as it likes.
    """
    read: deque[Item | None] = deque()  # and not answered yet
    ahead: list[Item] = []  # read before `iterate` asked for it

    def read_texts() -> Iterator[Item]:
        while True:
            try:
                item = ahead.pop() if ahead else next(items)
            except StopIteration:
                return
            read.append(item)
            if item is not None:
                yield item

    def read_blanks() -> Iterator[None]:
        for item in items:
            if item is not None:
                ahead.append(item)
                return
            yield None

    yield from read_blanks()
    for result in iterate(read_texts()):
        while (item := read.popleft()) is None:
            yield None
        yield item, result
        if not read:  # all is answered, and whoever wrote a blank line may wait for its answer
            yield from read_blanks()
    yield from (None for _ in read)


@contextlib.contextmanager
def blame_data(source: TextSource) -> Iterator[None]:
    """Turn an `InputError` into a `DataError` where texts are read from stdin or a file."""
    try:
        yield
    except DataError:
        raise
    except InputError as error:
        if not source.is_read:
            raise
        raise DataError(str(error)) from error
