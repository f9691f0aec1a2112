"""Rules about weights: whether they are there, and whether they are stored twice; none is read whole."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...runtime.bundle.bundle import LINKS_WAY_OUT
from ..passes.weight_files import LINK, NO_FILE, OUTSIDE, explain_refusal, list_external_tensors
from ..targets import Target
from .model import LintModel
from .rule import Hit, accept_all, make_rule

LARGE = 1 << 16  # bytes: a weight that is worth a word
SAMPLES = 64  # numbers that are compared of a weight
MULTIPLIES = frozenset({"Gemm", "MatMul", "Transpose"})
# What a finding says of a file that must not be opened.
PREDICATES = {
    OUTSIDE: "lies outside of the graph's folder, and is not looked at",
    LINK: f"is a link out of the graph's folder, and is not followed; {LINKS_WAY_OUT}",
    NO_FILE: "is not a regular file, and is not opened",
}
EXTERNAL_DATA = "https://github.com/onnx/onnx/blob/main/docs/ExternalData.md"


@make_rule(
    "a file of weights that is outside of the graph's folder, or no regular file",
    fix="copy the file next to the .onnx file, and name it without a folder",
    source=EXTERNAL_DATA,
    holds=accept_all,
    alike=True,
)
def check_weights_outside(model: LintModel, target: Target) -> Iterator[Hit]:
    """Yield files outside of the folder; they are not opened, not even to see whether they exist."""
    for tensor in list_external_tensors(model.model):
        location = str(tensor.location)
        if (why := explain_refusal(model.path, location)) is not None:
            yield Hit(f"the weights file {location!r} {PREDICATES[why]}", tensor=str(tensor.name))


@make_rule(
    "a file of weights that is missing or too short",
    fix="copy all files of the export, with their names, next to the .onnx file",
    source=EXTERNAL_DATA,
    holds=accept_all,
    alike=True,
)
def check_weights_missing(model: LintModel, target: Target) -> Iterator[Hit]:
    for value in model.list_weights():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        if tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
            yield Hit(
                f"is of type {tensor.dtype.name.lower()}, which lies in no file", tensor=str(value.name)
            )
            continue
        location = str(tensor.location)
        if explain_refusal(model.path, location) is not None:
            continue
        file = model.path.parent / location
        length = tensor.nbytes if tensor.length is None else tensor.length
        what = ""
        if not os.path.isfile(file):  # Path.is_file raises where a name is too long
            what = f"the weights file {location!r} is missing"
        elif (size := file.stat().st_size) < (tensor.offset or 0) + length:
            what = f"the weights file {location!r} is cut short: it has {size} bytes"
        elif length != tensor.nbytes:
            what = f"has {length} bytes in its file, and its shape needs {tensor.nbytes}"
        if what:
            yield Hit(what, tensor=str(value.name))


@make_rule(
    "two weights with the same numbers, one perhaps transposed",
    fix="keep one, and read it through a Transpose where it is needed transposed",
    severity="warning",
    source="compared here: some numbers of weights of one shape",
    holds=accept_all,
    alike=True,
)
def check_weights_twice(model: LintModel, target: Target) -> Iterator[Hit]:
    """Yield weights with the same numbers, also when one is the other's transpose."""
    found: dict[tuple[object, ...], str] = {}
    for value, tensor in list_large_weights(model):
        name = str(value.name)
        keys = sample_keys(tensor, map_bytes(model, name, tensor))
        first = next((found[key] for key in keys if key in found), None)
        if first is not None:
            yield Hit(f"has the numbers of {first!r}, {tensor.nbytes / 1e6:.1f} MB", tensor=name)
        elif keys:
            found[keys[0]] = name


def list_large_weights(model: LintModel) -> list[tuple[ir.Value, ir.TensorProtocol]]:
    pairs = [(value, value.const_value) for value in model.list_weights()]
    return [(value, tensor) for value, tensor in pairs if tensor is not None and is_large(tensor)]


def is_large(tensor: ir.TensorProtocol) -> bool:
    """Tell whether a tensor has many bytes; those of texts are not counted."""
    return tensor.dtype != ir.DataType.STRING and tensor.nbytes >= LARGE


def map_bytes(model: LintModel, name: str, tensor: ir.TensorProtocol) -> npt.NDArray[np.uint8] | None:
    """Return a weight's bytes where they lie, without reading them; None if they are not all there."""
    try:
        if name in model.inside:
            return np.frombuffer(model.inside[name], np.uint8, tensor.nbytes)
        if isinstance(tensor, ir.ExternalTensor) and not explain_refusal(model.path, str(tensor.location)):
            file = model.path.parent / tensor.location
            return np.memmap(file, np.uint8, "r", tensor.offset or 0, (tensor.nbytes,))
    except (OSError, OverflowError, ValueError):  # no file, an offset below 0, too few bytes
        return None
    return None


def sample_keys(tensor: ir.TensorProtocol, data: npt.NDArray[np.uint8] | None) -> list[tuple[object, ...]]:
    """Return keys of a weight: its type, shape and some of its numbers; of a square one also transposed.

    There are none if its numbers are all alike, or smaller than a byte.
    """
    width = int(tensor.dtype.itemsize)
    shape = tuple(tensor.shape.numpy())
    if data is None or width < 1 or not shape:
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
        numbers = data.reshape(-1, width)[row * columns + column]
        if (numbers != numbers[0]).any():
            keys.append((tensor.dtype, known, numbers.tobytes()))
    return keys


@make_rule(
    "a table with an odd number of rows that is looked up in and multiplied with",
    fix="pad the vocabulary by one row, and leave its logit out",
    severity="warning",
    holds=lambda target: target.engine == "tensorrt-rtx",
    alike=True,
)
def check_weights_tied(model: LintModel, target: Target) -> Iterator[Hit]:
    for value, tensor in list_large_weights(model):
        users = {node.op_type for node, _ in value.uses()}
        rows = int(tensor.shape.numpy()[0])
        if "Gather" in users and users & MULTIPLIES and rows % 2:
            what = f"is looked up in and multiplied with, and its {rows} rows are odd: a plan holds it twice"
            yield Hit(f"{what}, {tensor.nbytes / 1e6:.1f} MB more", tensor=str(value.name))
