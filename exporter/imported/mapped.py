"""Reads an ONNX file that holds its weights as if they were in files of their own: mapped, not copied.

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

Message = onnx.ModelProto | onnx.GraphProto | onnx.TensorProto

# Field numbers in onnx.proto, and protobuf's wire types.
GRAPH = 7
INITIALIZER = 5
RAW_DATA = 9
VARINT = 0
BYTES = 2
FIXED = {1: 8, 5: 4}  # and their bytes


def load_mapped(path: Path) -> ir.Model:
    """Load a graph whose large weights are read only when they are used."""
    proto = onnx.ModelProto()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        merge_message(proto, data, 0, len(data), path.name)
    model: ir.Model = ir.from_proto(proto)
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def merge_message(message: Message, data: mmap.mmap, begin: int, end: int, name: str) -> None:
    """Add the content of the named file to a message; of large raw data only its place in the file."""
    for field, start, first, last in read_fields(data, begin, end):
        if isinstance(message, onnx.ModelProto) and field == GRAPH:
            merge_message(message.graph, data, first, last, name)
        elif isinstance(message, onnx.GraphProto) and field == INITIALIZER:
            merge_message(message.initializer.add(), data, first, last, name)
        elif (
            isinstance(message, onnx.TensorProto)
            and field == RAW_DATA
            and last - first >= EXTERNAL_FROM_BYTES
        ):
            message.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", name), ("offset", first), ("length", last - first)):
                message.external_data.add(key=key, value=str(value))
        else:
            message.MergeFromString(data[start:last])


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
        elif kind in FIXED:
            last = place + FIXED[kind]
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
