"""Protobuf's wire format: where the fields of a message lie, so that bytes can be changed in place.

A message is a row of fields. Each begins with a tag, which is the field's number and its wire type; see
https://protobuf.dev/programming-guides/encoding/. Groups are refused; ONNX has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..errors import BackendError

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5  # the wire types
TYPE_BITS = 3  # of a tag
MAX_VARINT_BITS = 64
MAX_TAG = 2**32

# Numbers of the fields of an entry: of a map, and of ONNX's StringStringEntryProto.
ENTRY_KEY = 1
ENTRY_VALUE = 2


class Span(NamedTuple):
    """Where the content of a field lies."""

    start: int
    end: int


def find_fields(data: bytes, message: Span, *path: int) -> Iterator[Span]:
    """Yield the contents of the fields with a number; with several, of fields of fields.

    Raises a BackendError where the bytes are not such a message.
    """
    wanted, *rest = path
    for number, content in read_fields(data, message):
        if number != wanted:
            continue
        if rest:
            yield from find_fields(data, content, *rest)
        else:
            yield content


def find_numbers(data: bytes, message: Span, wanted: int) -> Iterator[int]:
    """Yield the integers of the fields with a number, which are not packed."""
    for number, content in read_all_fields(data, message):
        if number == wanted and isinstance(content, int):
            yield content


def read_fields(data: bytes, message: Span) -> Iterator[tuple[int, Span]]:
    """Yield the number and the content of each text, byte string and message in a message."""
    for number, content in read_all_fields(data, message):
        if isinstance(content, Span):
            yield number, content


def read_all_fields(data: bytes, message: Span) -> Iterator[tuple[int, Span | int]]:
    """Yield the number and the content of each field of a message, an integer as itself; no floats."""
    position = message.start
    while position < message.end:
        begin = position
        tag, position = read_varint(data, position, message.end)
        number, wire_type = divmod(tag, 1 << TYPE_BITS)
        if number == 0 or tag >= MAX_TAG:
            raise BackendError(f"damaged protobuf message: no field has the tag {tag} of byte {begin:,}")
        if wire_type == VARINT:
            value, position = read_varint(data, position, message.end)
            yield number, value
            continue
        if wire_type == LENGTH_DELIMITED:
            length, position = read_varint(data, position, message.end)
        elif wire_type in (FIXED64, FIXED32):
            length = 8 if wire_type == FIXED64 else 4
        else:
            raise BackendError(f"damaged protobuf message: wire type {wire_type} at byte {begin:,}")
        content = Span(position, position + length)
        if content.end > message.end:
            raise BackendError(
                f"damaged protobuf message: it ends at byte {message.end:,},"
                f" its field {number} at {content.end:,}"
            )
        if wire_type == LENGTH_DELIMITED:
            yield number, content
        position = content.end


def read_varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Return a number whose bytes hold seven bits each, lowest first, and where it ends."""
    value = 0
    for shift in range(0, MAX_VARINT_BITS, 7):
        if position >= end:
            raise BackendError(f"damaged protobuf message: it ends at byte {end:,}, within a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise BackendError(f"damaged protobuf message: a number at byte {position:,} is too long")
