"""Reads files of word vectors: word2vec's text and binary, and GloVe's text.

Each word is followed by its numbers. word2vec's files begin with a line that says how many words there are,
and how many numbers each has; GloVe's text has no such line.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from .word_vectors import MAX_DIMENSIONS, MAX_WORDS

Vectors: TypeAlias = npt.NDArray[np.float32]

MAX_WORD_BYTES = 4096
MAX_NUMBER_BYTES = 32  # of a number as text, with the space before it
PEEKED = 2**16  # bytes behind the first line, which tell text from binary numbers
PACKED = {b"\x1f\x8b": "gunzip", b"PK\x03\x04": "unzip"}  # how a packed file begins, and what unpacks it
FORMATS = (
    "a file begins with `count size`, two positive integers, or with a word and at least two numbers,"
    " separated by spaces"
)
RETRY_HINT = "download the file again, or write it again"


@dataclass(frozen=True)
class Header:
    """The sizes in a file's first line.

    Attributes:
        count: words.
        size: numbers of each.
    """

    count: int
    size: int


def read_vector_file(path: Path) -> tuple[list[str], Vectors]:
    """Read a file of word vectors, whichever of the three formats it has.

    Args:
        path: a regular file.

    Returns:
        V different words, and their vectors (V, D), float32.

    Raises:
        ValueError: the file is packed, cut off or damaged, its first line does not fit the rest, or a word is
            there twice; names the file and the line or the word.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    with path.open("rb") as file:
        first = file.readline(MAX_WORD_BYTES + MAX_DIMENSIONS * MAX_NUMBER_BYTES)
        for mark, tool in PACKED.items():
            if first.startswith(mark):
                raise ValueError(f"{path} is packed; {tool} it first")
        header = read_header(path, first)
        if header is None:
            size = count_numbers(path, first)
            file.seek(0)
            return read_text(path, file, Header(0, size), counted=False)
        begin = file.tell()
        is_binary = not looks_like_text(file.read(PEEKED))
        file.seek(begin)
        left = path.stat().st_size - begin
        least = 4 * header.size + 2 if is_binary else 2 * header.size + 1  # the last line may lack its end
        if left < header.count * least:
            raise ValueError(
                f"{path} is cut off, or its first line is wrong: {header.count} words of {header.size}"
                f" numbers take more than the {left} bytes behind it; {RETRY_HINT}"
            )
        return read_binary(path, file, header) if is_binary else read_text(path, file, header)


def read_header(path: Path, line: bytes) -> Header | None:
    """Return the sizes in a first line; None where it has a word and its vector already."""
    fields = line.split()
    if len(fields) != 2 or not all(field.isdigit() for field in fields):
        return None
    count, size = (int(field[:20]) for field in fields)
    if not 1 <= count <= MAX_WORDS or not 1 <= size <= MAX_DIMENSIONS:
        raise ValueError(
            f"{path}: the first line says {count} words of {size} numbers; from 1 to {MAX_WORDS} words of 1"
            f" to {MAX_DIMENSIONS} are read"
        )
    return Header(count, size)


def count_numbers(path: Path, line: bytes) -> int:
    """Return how many numbers each word has, by the first line of a file without a header."""
    if not line:
        raise ValueError(f"{path}: the file is empty; {RETRY_HINT}")
    if line.startswith(codecs.BOM_UTF8):
        raise ValueError(f"{path} begins with a byte order mark; write it again in UTF-8 without one")
    size = line.rstrip(b" \r\n").count(b" ")
    if size < 2:
        tabs = explain_tabs(line)
        raise ValueError(f"{path}: the first line is {line[:60]!r}; {tabs or FORMATS}")
    return size


def explain_tabs(line: bytes) -> str:
    """Return what is wrong with a line whose columns are separated by tabs; "" for others."""
    return "its columns are separated by tabs, where spaces are needed" if b"\t" in line else ""


def looks_like_text(data: bytes) -> bool:
    """Tell whether the beginning of a file is text: UTF-8 without control characters."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if error.end < len(data) or error.reason != "unexpected end of data":
            return False
        text = data[: error.start].decode()
    return not any(letter < " " and letter not in "\t\r\n" for letter in text)


class Words:
    """The words of a file so far, all different.

    Args:
        path: the file.
        unit: what a word's number counts, "line" or "word".
    """

    def __init__(self, path: Path, unit: str) -> None:
        self.path = path
        self.unit = unit
        self.numbers: dict[str, int] = {}

    def add(self, spelled: bytes, number: int) -> None:
        """Add a word; refuse one that is empty, too long, not UTF-8, or there already."""
        where = f"{self.path}: {self.unit} {number}"
        if not spelled:
            raise ValueError(f"{where} has no word before its numbers; {RETRY_HINT}")
        if len(spelled) > MAX_WORD_BYTES:
            raise ValueError(f"{where} has a word of {len(spelled)} bytes; at most {MAX_WORD_BYTES} are read")
        try:
            word = spelled.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{where} has a word that is not UTF-8, {spelled[:40]!r}; write the file again in UTF-8"
            ) from error
        if (first := self.numbers.setdefault(word, number)) != number:
            raise ValueError(
                f"{where} has the word {word!r:.80} again, which {self.unit} {first} has; a word has one"
                " vector: take out one of the two"
            )


def read_text(path: Path, file: BinaryIO, header: Header, counted: bool = True) -> tuple[list[str], Vectors]:
    """Read a line for each word; a first line was read before where words are `counted`."""
    words = Words(path, "line")
    vectors: list[Vectors] = []
    longest = MAX_WORD_BYTES + header.size * MAX_NUMBER_BYTES
    number = int(counted)
    while line := file.readline(longest + 1):
        number += 1
        if len(line) > longest:
            raise ValueError(f"{path}: line {number} has more than {longest} bytes, too many for a word's")
        word, *fields = split_line(path, number, line, header.size)
        words.add(word, number)
        vectors.append(parse_numbers(path, number, fields))
        if len(vectors) > (header.count if counted else MAX_WORDS):
            break
    if counted and len(vectors) != header.count:
        found = f"has {len(vectors)}" if len(vectors) < header.count else "has more"
        raise ValueError(
            f"{path}: the first line says {header.count} words, and the file {found}; {RETRY_HINT}"
        )
    if not vectors or len(vectors) > MAX_WORDS:
        raise ValueError(f"{path} has {len(vectors) or 'no'} words; from 1 to {MAX_WORDS} are read")
    check_size(path, list(words.numbers), header.size, counted)
    return list(words.numbers), np.stack(vectors)


def check_size(path: Path, words: list[str], size: int, counted: bool) -> None:
    """Refuse a first line that says fewer numbers than all other lines have: words would end with the rest.

    A few words may end with a number, such as "windows 98"; in a file without a header the first cannot.
    """
    followed = words if counted else words[1:]
    if not followed or not all(ends_with_number(word) for word in followed):
        return
    what = f"says {size} numbers a word" if counted else f"has {size} numbers"
    if not counted and is_number(words[0]):
        what = "looks like a header, but has more than `count size`"
    raise ValueError(f"{path}: line 1 {what}, and every other line has more than {size}; {RETRY_HINT}")


def ends_with_number(word: str) -> bool:
    """Tell whether what stands behind a word's last space is a number."""
    _, space, last = word.rpartition(" ")
    return bool(space) and is_number(last)


def is_number(text: str) -> bool:
    """Tell whether a text spells a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def split_line(path: Path, number: int, line: bytes, size: int) -> list[bytes]:
    """Return a line's word, which may hold spaces, and its numbers."""
    parts = line.rstrip(b" \r\n").rsplit(b" ", size)
    if len(parts) != size + 1:
        raise ValueError(
            f"{path}: line {number} is not a word and {size} numbers, as line 1 says: {line[:60]!r};"
            f" {explain_tabs(line) or RETRY_HINT}"
        )
    return parts


def parse_numbers(path: Path, number: int, fields: list[bytes]) -> Vectors:
    """Return the numbers (D,) of a line."""
    try:
        with np.errstate(over="ignore"):  # infinity is refused below
            vector = np.array([float(field) for field in fields], np.float32)
    except ValueError as error:
        raise ValueError(f"{path}: line {number} has a number that is none: {error}") from error
    return check_numbers(vector, f"{path}: line {number}")


def check_numbers(vector: Vectors, where: str) -> Vectors:
    """Return a vector (D,); refuse one with NaN or infinity."""
    if not np.isfinite(vector).all():
        raise ValueError(f"{where} has NaN or infinity among its numbers; {RETRY_HINT}")
    return vector


def read_binary(path: Path, file: BinaryIO, header: Header) -> tuple[list[str], Vectors]:
    """Read a word, a space and its little-endian numbers; some writers end each with a new line."""
    words = Words(path, "word")
    vectors = np.empty((header.count, header.size), np.float32)
    for number in range(1, header.count + 1):
        spelled = read_word(path, file, number)
        data = file.read(4 * header.size)
        if len(data) < 4 * header.size:
            raise ValueError(
                f"{path} ends inside the vector of word {number} of {header.count}; {RETRY_HINT}"
            )
        words.add(spelled, number)
        vector: Any = np.frombuffer(data, "<f4")
        vectors[number - 1] = check_numbers(vector, f"{path}: word {number}")
    if file.read(PEEKED).strip():
        raise ValueError(
            f"{path} goes on behind the {header.count} words that its first line says; {RETRY_HINT}"
        )
    return list(words.numbers), vectors


def read_word(path: Path, file: BinaryIO, number: int) -> bytes:
    """Return the bytes before a space, without the end of the vector before."""
    spelled = bytearray()
    while (letter := file.read(1)) != b" ":
        if not letter:
            raise ValueError(f"{path} ends before word {number}; {RETRY_HINT}")
        if letter == b"\n" and not spelled:
            continue
        spelled += letter
        if len(spelled) > MAX_WORD_BYTES:
            raise ValueError(
                f"{path}: word {number} has more than {MAX_WORD_BYTES} bytes: the first line says another"
                f" number of numbers than the vectors have, or the file is damaged; {RETRY_HINT}"
            )
    return bytes(spelled)
