"""Rules about weights: whether they are there, and whether they are there twice. None is read as a whole."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import onnx_ir as ir

from ..passes.weight_files import LINK, NO_FILE, OUTSIDE, explain_refusal, external_tensors
from ..targets import Target
from .model import LintModel
from .rule import Hit, everywhere, rule

LARGE = 1 << 16  # bytes: a weight that is worth a word
SAMPLES = 64  # numbers that are compared of a weight
MULTIPLIES = frozenset({"Gemm", "MatMul", "Transpose"})
# What a finding says of a file that must not be opened.
PREDICATES = {
    OUTSIDE: "lies outside of the graph's folder, and is not looked at",
    LINK: "is a link out of the graph's folder, and is not followed",
    NO_FILE: "is no regular file, and is not opened",
}

Read = Callable[[int, int], bytes]  # offset and length in bytes


@rule(
    "weights-outside",
    "a file of weights that is outside of the graph's folder, or no regular file",
    fix="copy the file beside the .onnx file, and name it without a folder",
    source="https://github.com/onnx/onnx/blob/main/docs/ExternalData.md",
    holds=everywhere,
    alike=True,
)
def weights_outside(model: LintModel, target: Target) -> Iterator[Hit]:
    """Yield files that are not opened, not even to look whether they are there."""
    for tensor in external_tensors(model.model):
        location = str(tensor.location)
        if (why := explain_refusal(model.path, location)) is not None:
            yield Hit(f"the weights file {location!r} {PREDICATES[why]}", tensor=str(tensor.name))


@rule(
    "weights-missing",
    "a file of weights that is missing or too short",
    fix="copy all files of the export, with their names, beside the .onnx file",
    source="https://github.com/onnx/onnx/blob/main/docs/ExternalData.md",
    holds=everywhere,
    alike=True,
)
def weights_missing(model: LintModel, target: Target) -> Iterator[Hit]:
    for value in model.weights():
        tensor = value.const_value
        if (
            isinstance(tensor, ir.ExternalTensor)
            and explain_refusal(model.path, str(tensor.location)) is None
        ):
            file = model.path.parent / tensor.location
            end = (tensor.offset or 0) + (tensor.nbytes if tensor.length is None else tensor.length)
            if not os.path.isfile(file):  # Path.is_file raises where a name is too long
                yield Hit(f"the weights file {str(tensor.location)!r} is missing", tensor=str(value.name))
            elif file.stat().st_size < end:
                size = file.stat().st_size
                what = f"the weights file {str(tensor.location)!r} is cut short: it has {size} bytes"
                yield Hit(what, tensor=str(value.name))
            elif tensor.length is not None and tensor.length != tensor.nbytes:
                what = f"has {tensor.length} bytes in its file, and its shape needs {tensor.nbytes}"
                yield Hit(what, tensor=str(value.name))


@rule(
    "weights-twice",
    "two weights with the same numbers, one perhaps transposed",
    fix="keep one, and read it through a Transpose where it is needed transposed",
    severity="warning",
    source="compared here: some numbers of weights of one shape",
    holds=everywhere,
    alike=True,
)
def weights_twice(model: LintModel, target: Target) -> Iterator[Hit]:
    """Yield weights with the same numbers, also when one is the other's transpose."""
    found: dict[tuple[object, ...], str] = {}
    with ExitStack() as files:
        for value in large_weights(model):
            read = open_reader(model, value, files)
            if read is None or value.const_value is None:
                continue
            name = str(value.name)
            size = value.const_value.nbytes / 1e6
            keys = sample_keys(value.const_value, read)
            first = next((found[key] for key in keys if key in found), None)
            if first is not None:
                yield Hit(f"has the numbers of {first!r}, {size:.1f} MB", tensor=name)
            elif keys:
                found[keys[0]] = name


def large_weights(model: LintModel) -> list[ir.Value]:
    return [v for v in model.weights() if v.const_value is not None and v.const_value.nbytes >= LARGE]


def open_reader(model: LintModel, value: ir.Value, files: ExitStack) -> Read | None:
    """Return a function that reads bytes of a weight, wherever it lies; None if it cannot be read."""
    tensor = value.const_value
    data = model.inside.get(str(value.name))
    if data is not None:
        return lambda offset, length: data[offset : offset + length]
    if not isinstance(tensor, ir.ExternalTensor):
        return None
    if explain_refusal(model.path, str(tensor.location)) is not None:
        return None
    start = tensor.offset or 0
    try:
        file = files.enter_context((model.path.parent / tensor.location).open("rb", buffering=0))
    except OSError:
        return None

    def read(offset: int, length: int) -> bytes:
        file.seek(start + offset)
        return file.read(length)

    return read


def sample_keys(tensor: ir.TensorProtocol, read: Read) -> list[tuple[object, ...]]:
    """Return keys of a weight: its type, shape and some of its numbers; of a square one also transposed.

    There are none if its numbers are all alike, or smaller than a byte.
    """
    width = int(tensor.dtype.itemsize)
    shape = tuple(tensor.shape.numpy())
    if width < 1 or not shape:
        return []
    rows = math.prod(shape[:-1])
    columns = shape[-1]
    places = np.random.default_rng(0).random((SAMPLES, 2))
    wide = rows <= columns or len(shape) != 2
    low, high = (rows, columns) if wide else (columns, rows)
    i, j = ((places * (low, high)).astype(np.int64)).T
    orders = [(i, j) if wide else (j, i)]
    if rows == columns and len(shape) == 2:
        orders.append((j, i))
    known = (low, high) if len(shape) == 2 else shape
    keys: list[tuple[object, ...]] = []
    for row, column in orders:
        numbers = [read(int(k) * width, width) for k in row * columns + column]
        if len(set(numbers)) > 1 and all(len(number) == width for number in numbers):
            keys.append((tensor.dtype, known, b"".join(numbers)))
    return keys


@rule(
    "weights-tied",
    "a table with an odd number of rows that is looked up in and multiplied with",
    fix="pad the vocabulary by one row, and leave its logit out",
    severity="warning",
    holds=lambda target: target.engine == "tensorrt-rtx",
    alike=True,
)
def weights_tied(model: LintModel, target: Target) -> Iterator[Hit]:
    for value in large_weights(model):
        users = {node.op_type for node, _ in value.uses()}
        tensor = value.const_value
        if tensor is None or "Gather" not in users or not users & MULTIPLIES:
            continue
        rows = int(tensor.shape.numpy()[0])
        if rows % 2:
            what = f"is looked up in and multiplied with, and its {rows} rows are odd: a plan holds it twice"
            yield Hit(f"{what}, {tensor.nbytes / 1e6:.1f} MB more", tensor=str(value.name))


RULES = (weights_outside, weights_missing, weights_twice, weights_tied)
