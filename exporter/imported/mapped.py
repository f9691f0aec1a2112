"""Reads an ONNX file that holds its weights as if they lay beside it: mapped, not copied.

Protobuf would hold such a file in memory twice while it reads it, and all of it as long as one small tensor
is used. Here its large tensors become references to their places in the file itself.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from ..passes.weights import EXTERNAL_FROM_BYTES

# Field numbers in onnx.proto, and protobuf's wire types.
GRAPH = 7
INITIALIZER = 5
RAW_DATA = 9
VARINT = 0
FIXED64 = 1
BYTES = 2
FIXED32 = 5


def load_mapped(path: Path) -> ir.Model:
    """Load a graph whose large weights are read only when they are used.

    Raises:
        Exception: protobuf's own, or a ValueError, where the file is not ONNX.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        proto = onnx.ModelProto.FromString(
            externalize_weights(data, 0, len(data), (GRAPH, INITIALIZER), path.name)
        )
    model: ir.Model = ir.from_proto(proto)
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def externalize_weights(data: mmap.mmap, begin: int, end: int, inside: tuple[int, ...], name: str) -> bytes:
    """Return a message in which large raw data is replaced by its place in the file.

    Args:
        inside: fields that lead to tensors; none where the message is a tensor.
        name: the file's name.
    """
    parts = []
    for field, start, first, last in read_fields(data, begin, end):
        if inside and field == inside[0]:
            message = externalize_weights(data, first, last, inside[1:], name)
            parts += [encode_varint(field << 3 | BYTES), encode_varint(len(message)), message]
        elif not inside and field == RAW_DATA and last - first >= EXTERNAL_FROM_BYTES:
            place = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
            for key, value in (("location", name), ("offset", first), ("length", last - first)):
                place.external_data.add(key=key, value=str(value))
            parts.append(place.SerializeToString())
        else:
            parts.append(data[start:last])
    return b"".join(parts)


def read_fields(data: mmap.mmap, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield each field of a message: its number, where it begins, where its content does, where it ends."""
    place = begin
    while place < end:
        start = place
        key, place = read_varint(data, place)
        kind = key & 7
        if kind == VARINT:
            _, last = read_varint(data, place)
        elif kind == BYTES:
            length, place = read_varint(data, place)
            last = place + length
        elif kind in (FIXED64, FIXED32):
            last = place + (8 if kind == FIXED64 else 4)
        else:
            raise ValueError(f"no protobuf message: type {kind} at byte {start}")
        if last > end:
            raise ValueError(f"the message ends at byte {end}, in the middle of a field")
        yield key >> 3, start, place, last
        place = last


def read_varint(data: mmap.mmap, place: int) -> tuple[int, int]:
    """Return a number, and where it ends."""
    number = shift = 0
    while True:
        byte = data[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place
        shift += 7


def encode_varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])
