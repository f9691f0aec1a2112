"""The files beside a graph that hold its weights: a graph names them, so a name may lead anywhere."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import onnx_ir as ir

from ..errors import VerificationError

OUTSIDE = "outside of its folder"
LINK = "which is a link; copy the file there"
NO_FILE = "which is no regular file"


def explain_refusal(graph: Path, location: str) -> str | None:
    """Return why a file of weights must not be opened, or None where it may be, or is missing.

    `location` is as the graph has it, relative to the graph's folder. Nothing is opened here: a pipe would
    block for ever, and even the size of another's file would be told.
    """
    place = PurePosixPath(location.replace("\\", "/"))
    if not place.parts or place.is_absolute() or ".." in place.parts or ":" in location or "\0" in location:
        return OUTSIDE
    folder = os.path.realpath(graph.parent)
    file = os.path.realpath(graph.parent / place)
    if os.path.commonpath([folder, file]) != folder:
        return LINK
    try:
        mode = os.lstat(file).st_mode
    except OSError:
        return None
    return None if stat.S_ISREG(mode) else NO_FILE


def load_graph(path: Path) -> ir.Model:
    """Return a graph whose weights stay mapped; VerificationError if a file of them must not be opened."""
    model = ir.load(path)
    for tensor in list_external_tensors(model):
        location = str(tensor.location)
        if (why := explain_refusal(path, location)) is not None:
            raise VerificationError(f"{path}: weight {tensor.name!r} lies in {location}, {why}")
    map_linked_files(model, path)
    return model


def map_linked_files(model: ir.Model, path: Path) -> None:
    """Let weights be mapped whose file has a second name, as a packaged bundle's has.

    onnx-ir reads no such file below a folder that it knows, so it is told the whole path alone. Nothing is
    risked by that: of a bundle's files the content counts, which the manifest lists.
    """
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        file = (path.parent / tensor.location).resolve()
        if file.is_file() and file.stat().st_nlink > 1:
            value.const_value = ir.ExternalTensor(
                file,
                tensor.offset,
                tensor.length,
                tensor.dtype,
                shape=ir.Shape(tensor.shape),
                name=tensor.name or "",
            )


def list_external_tensors(model: ir.Model) -> list[ir.ExternalTensor]:
    """Return every tensor that lies in another file: of weights and constants, of branches and functions."""
    roots: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    graphs = [graph for root in roots for graph in (root, *root.subgraphs())]
    found: list[object] = []
    for graph in graphs:
        if isinstance(graph, ir.Graph):
            found += [value.const_value for value in graph.initializers.values()]
        for attribute in (attribute for node in graph for attribute in node.attributes.values()):
            if attribute.type == ir.AttributeType.TENSOR:
                found.append(attribute.value)
            elif attribute.type == ir.AttributeType.TENSORS and not attribute.is_ref():
                found += attribute.value
    return [tensor for tensor in found if isinstance(tensor, ir.ExternalTensor)]


def move_weights(model: ir.Model, names: Mapping[str, str]) -> None:
    """Point a graph at its weights under their new names, by the names of the files that they lie in now."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            location = names[Path(tensor.location).name]
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor(
                location, tensor.offset, tensor.length, tensor.dtype, shape=shape, name=str(tensor.name)
            )
