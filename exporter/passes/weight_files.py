"""The weights files next to a graph: it names them itself, so a name may lead anywhere."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

import onnx_ir as ir

from ...runtime.bundle.bundle import LINKS_WAY_OUT, leaves_bundle
from ..errors import VerificationError

OUTSIDE = "outside of its folder"
LINK = f"which is a link that leaves the folder; {LINKS_WAY_OUT}"
NO_FILE = "which is not a regular file"


def explain_refusal(graph: Path, location: str) -> str | None:
    """Return why a file of weights must not be opened, or None where it may be, or is missing.

    `location` is as the graph has it, relative to the graph's folder. Nothing is opened here: a pipe would
    block for ever, and even the size of another's file would be told. A hub's cache has links, which are
    followed as `leaves_bundle` allows.
    """
    place = PurePosixPath(location.replace("\\", "/"))
    if not place.parts or place.is_absolute() or ".." in place.parts or ":" in location or "\0" in location:
        return OUTSIDE
    file = graph.parent / place
    if leaves_bundle(graph.parent, file):
        return LINK
    try:
        mode = os.lstat(os.path.realpath(file)).st_mode
    except OSError:
        return None
    return None if stat.S_ISREG(mode) else NO_FILE


def load_graph(path: Path) -> ir.Model:
    """Return a graph whose weights stay mapped; VerificationError if a file of them must not be opened."""
    model = ir.load(path)
    locations: dict[str, ir.ExternalTensor] = {}
    for tensor in list_external_tensors(model):
        locations.setdefault(str(tensor.location), tensor)
    for location, first in locations.items():  # one file holds hundreds of weights
        if (why := explain_refusal(path, location)) is not None:
            raise VerificationError(f"{path}: weight {first.name!r} lies in {location}, {why}")
    if any(is_link(path.parent / location) for location in locations):
        replace_external(model, lambda tensor: allow_links(tensor, path))
    return model


def replace_external(model: ir.Model, replace: Callable[[ir.ExternalTensor], ir.TensorProtocol]) -> None:
    """Put other tensors in place of a model's weights in files, those of branches and Constants too."""
    for graph in list_graphs(model):
        for value in graph.initializers.values() if isinstance(graph, ir.Graph) else ():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = replace(value.const_value)
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if isinstance(attribute.value, ir.ExternalTensor):
                    node.attributes.add(ir.AttrTensor(name, replace(attribute.value)))


def is_link(file: Path) -> bool:
    """Tell whether a file is a link, or has a second name."""
    return file.is_file() and (file.stat().st_nlink > 1 or file.is_symlink())


def allow_links(tensor: ir.ExternalTensor, graph: Path) -> ir.ExternalTensor:
    """Return a graph's tensor that is mapped also where its file is a link, or has a second name.

    A hub's cache has links, and a packaged bundle may have second names. onnx-ir reads neither below a folder
    that it knows, so it is told the whole path alone. Nothing is risked by that where `explain_refusal` has
    passed the file: of a bundle's files the content counts, which the manifest lists.
    """
    file = graph.parent.absolute() / tensor.location
    if not is_link(file):
        return tensor
    return ir.ExternalTensor(
        file,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=ir.Shape(tensor.shape),
        name=tensor.name or "",
    )


def list_graphs(model: ir.Model) -> list[ir.Graph | ir.Function]:
    """Return a model's graph, its functions, and the branches of both."""
    roots: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    return [graph for root in roots for graph in (root, *root.subgraphs())]


def list_external_tensors(model: ir.Model) -> list[ir.ExternalTensor]:
    """Return every tensor that lies in another file: of weights and constants, of branches and functions."""
    found: list[object] = []
    for graph in list_graphs(model):
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
