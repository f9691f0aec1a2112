"""Reads GGUF files, as llama.cpp writes them: settings, and tensors whose numbers stay in the file.

A file has, in little-endian: magic, version, the counts of tensors and settings, the settings, the tensors'
names, shapes, types and places, and the tensors, each at a multiple of the alignment.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MAX_COUNT = 2**20  # of tensors, and of settings
MAX_LENGTH = 2**24  # of a string or an array
ARRAY = 9
STRING = 8
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# The types of tensors that are read: name, values in a block, bytes of a block; by their numbers.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
WAY_OUT = "give one in F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K or Q6_K, or the original model"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        type: by its name, such as "Q4_0".
        shape: the outermost axis first.
        data: its bytes, (rows, bytes of a row), or () bytes of a vector as one row.
    """

    type: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GgufFile:
    """A read file: its settings, and its tensors by name."""

    path: Path
    settings: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Return the architecture, such as "llama"; "" where the file names none."""
        return str(self.settings.get("general.architecture", ""))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting of the architecture, such as "block_count"."""
        return self.settings.get(f"{self.architecture}.{name}", default)


class Reader:
    """Reads values from a mapped file, one after the other."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def take(self, size: int) -> int:
        """Return the place of the next `size` bytes; refuse a file that ends before."""
        start = self.at
        if size > len(self.data) - start:
            raise ValueError(
                f"{self.path} ends after {len(self.data)} bytes, where at least {start + size} are expected:"
                " it is not whole; download it again"
            )
        self.at += size
        return start

    def read(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.take(struct.calcsize(code)))[0]

    def read_count(self, most: int) -> int:
        count = self.read("Q")
        if count > most:
            raise ValueError(
                f"{self.path} has a count of {count} at byte {self.at - 8}, and at most {most} are read"
            )
        return int(count)

    def read_text(self) -> str:
        size = self.read_count(MAX_LENGTH)
        start = self.take(size)
        return self.data[start : start + size].decode("utf-8", errors="replace")

    def read_value(self, kind: int) -> Any:
        if kind == STRING:
            return self.read_text()
        if kind in SCALARS:
            return self.read(SCALARS[kind])
        if kind != ARRAY:
            raise ValueError(f"{self.path} has a value of the unknown type {kind} at byte {self.at}")
        inner = self.read("I")
        count = self.read_count(MAX_LENGTH)
        if inner in SCALARS:
            code = SCALARS[inner]
            start = self.take(count * struct.calcsize(code))
            return list(struct.unpack_from(f"<{count}{code}", self.data, start))
        if inner != STRING:
            raise ValueError(f"{self.path} has an array of the unknown type {inner} at byte {self.at}")
        return [self.read_text() for _ in range(count)]


def read_gguf(path: Path) -> GgufFile:
    """Read a file.

    Raises:
        ValueError: the file is cut or damaged, of another version, in parts, or has a type that is not read;
            names the tensor and what to do.
    """
    with path.open("rb") as file:
        try:
            reader = Reader(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError as error:  # an empty file
            raise ValueError(f"{path} is empty") from error
    if reader.data[:4] != MAGIC:
        raise ValueError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    reader.take(4)
    if (version := reader.read("I")) not in VERSIONS:
        raise ValueError(f"{path} has GGUF's version {version}, and {VERSIONS} are read")
    tensor_count = reader.read_count(MAX_COUNT)
    settings: dict[str, Any] = {}
    for _ in range(reader.read_count(MAX_COUNT)):
        name = reader.read_text()
        settings[name] = reader.read_value(reader.read("I"))
    if (parts := settings.get("split.count", 0)) and parts > 1:
        raise ValueError(f"{path} is one of {parts} parts; join them: llama-gguf-split --merge FIRST OUT")
    entries = [read_entry(reader) for _ in range(tensor_count)]
    alignment = settings.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"{path} has the alignment {alignment!r}")
    start = -(-reader.at // alignment) * alignment
    view = np.frombuffer(reader.data, np.uint8)
    tensors = {}
    for name, kind, shape, offset in entries:
        if name in tensors:
            raise ValueError(f"{path} has {name} twice")
        tensors[name] = map_tensor(path, view, name, kind, shape, start + offset)
    return GgufFile(path, settings, tensors)


def read_entry(reader: Reader) -> tuple[str, int, tuple[int, ...], int]:
    """Return a tensor's name, type, shape and place."""
    name = reader.read_text()
    axes = reader.read("I")
    if axes > 4:
        raise ValueError(f"{reader.path}: {name} has {axes} axes")
    shape = tuple(reader.read("Q") for _ in range(axes))[::-1]
    return name, reader.read("I"), shape, reader.read("Q")


def map_tensor(
    path: Path, view: npt.NDArray[np.uint8], name: str, kind: int, shape: tuple[int, ...], start: int
) -> GgufTensor:
    """Return a tensor whose bytes are mapped; refuse a type that is not read, and bytes beyond the file."""
    if kind not in TYPES:
        raise ValueError(f"{path}: {name} has the type {kind} of GGML, which is not read; {WAY_OUT}")
    label, values, size = TYPES[kind]
    width = shape[-1] if shape else 1
    rows = 1
    for length in shape[:-1]:
        rows *= length
    if width % values:
        raise ValueError(f"{path}: {name} has rows of {width}, which are no blocks of {values} ({label})")
    row = width // values * size
    if start + rows * row > len(view):
        raise ValueError(
            f"{path} ends after {len(view)} bytes, and {name} would end at {start + rows * row}: it is not"
            " whole; download it again"
        )
    return GgufTensor(label, shape, view[start : start + rows * row].reshape(rows, row))
