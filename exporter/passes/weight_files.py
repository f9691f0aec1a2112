"""The weights files next to a graph: it names them itself, so a name may lead anywhere."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...runtime.backends.backend import Array
from ...runtime.bundle.bundle import LINKS_WAY_OUT, leaves_bundle
from ..errors import VerificationError
from ..memory import give_back_map

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


class FileTensor(ir.ExternalTensor):
    """A weight in a file that is mapped once for all weights in it.

    onnx-ir maps the file for each weight anew and holds it open, so a graph of a thousand weights reaches the
    limit of files that a process may have open. It also reads no links and no second names of files below a
    folder that it knows, and a hub's cache has links. Nothing is risked by that where `explain_refusal` has
    passed the file: of a bundle's files the content counts, which the manifest lists.
    """

    def __init__(self, tensor: ir.ExternalTensor, graph: Path, maps: dict[Path, mmap.mmap]) -> None:
        """Stand for a tensor of the graph in a file; `maps` has the files that are mapped already."""
        super().__init__(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape),
            name=tensor.name or "",
            base_dir=graph.parent,
        )
        self._path = graph.parent / tensor.location
        self._maps = maps
        self._values: Array | None = None

    def numpy(self) -> Array:
        """Return the weight as it lies in the file, without copying; a type below a byte is unpacked."""
        if self._values is None:
            content = self._read()
            if self.dtype.bitwidth < 8:
                self._values = ir.PackedTensor(content, self.dtype, shape=self.shape).numpy()
            else:
                self._values = content.view(self.dtype.numpy()).reshape(self.shape.numpy())
        return self._values

    def __array__(self, dtype: Any = None) -> Array:
        """Return the weight for numpy."""
        return self.numpy().__array__(dtype)

    def tobytes(self) -> bytes:
        """Return the weight's bytes as they lie in the file."""
        return self._read().tobytes()

    def tofile(self, file: IO[bytes]) -> None:
        """Write the weight's bytes, without copying them."""
        file.write(self._read().data)

    def release(self) -> None:
        """Let go of the weight's pages: what is mapped counts as this process's memory."""
        self._values = None
        if self._path in self._maps:
            begin = self.offset or 0
            give_back_map(self._maps[self._path], begin, begin + self.nbytes)

    def _read(self) -> npt.NDArray[np.uint8]:
        """Return the weight's bytes, which come from the file when they are used."""
        if not self.nbytes:
            return np.zeros(0, np.uint8)  # a file without bytes cannot be mapped
        if self._path not in self._maps:
            with self._path.open("rb") as file:
                self._maps[self._path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._maps[self._path], np.uint8, self.nbytes, self.offset or 0)


def load_graph(path: Path) -> ir.Model:
    """Return a graph whose weights stay mapped; VerificationError if a file of them must not be opened."""
    model = ir.load(path)
    locations: dict[str, ir.ExternalTensor] = {}
    for tensor in list_external_tensors(model):
        locations.setdefault(str(tensor.location), tensor)
    for location, first in locations.items():  # one file holds hundreds of weights
        if (why := explain_refusal(path, location)) is not None:
            raise VerificationError(f"{path}: weight {first.name!r} lies in {location}, {why}")
    maps: dict[Path, mmap.mmap] = {}
    replace_external(model, lambda tensor: FileTensor(tensor, path, maps))
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
