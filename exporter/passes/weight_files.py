"""The files beside a graph that hold its weights: a graph names them, so a name may lead anywhere."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import onnx_ir as ir

from ..errors import VerificationError

OUTSIDE = "outside of its folder"
LINK = "which is a link; copy the file there"
NO_FILE = "which is no regular file"


def explain_refusal(graph: Path, location: str) -> str | None:
    """Return why a file of weights must not be opened, or None where it may be, or is missing.

    Nothing is opened here: a pipe would block for ever, and even the size of another's file would be told.

    Args:
        graph: the .onnx file that names it.
        location: as the graph has it, relative to the graph's folder.
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
    """Return a graph whose weights lie in regular files of its folder; they stay mapped.

    Raises:
        VerificationError: one does not; names it.
    """
    model = ir.load(path)
    for tensor in external_tensors(model):
        location = str(tensor.location)
        if (why := explain_refusal(path, location)) is not None:
            raise VerificationError(f"{path}: weight {tensor.name!r} lies in {location}, {why}")
    return model


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yield every tensor that lies in another file: of weights and constants, of branches and functions."""
    roots: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for root in roots:
        for graph in (root, *root.subgraphs()):
            if isinstance(graph, ir.Graph):
                for value in graph.initializers.values():
                    if isinstance(value.const_value, ir.ExternalTensor):
                        yield value.const_value
            for node in graph:
                yield from external_attributes(node)


def external_attributes(node: ir.Node) -> Iterator[ir.ExternalTensor]:
    """Yield the tensors of a node's attributes that lie in another file."""
    for attribute in node.attributes.values():
        if attribute.is_ref() or attribute.type not in (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS):
            continue
        tensors = [attribute.value] if attribute.type == ir.AttributeType.TENSOR else attribute.value
        yield from (tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor))
