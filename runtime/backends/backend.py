"""The interface between decoding and engines.

Protocols that a backend implements without an import from here, and a fake engine for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ..bundle.bundle import Bundle
from ..bundle.manifest import Artifact

Array: TypeAlias = npt.NDArray[Any]
Shape: TypeAlias = tuple[int, ...]


class Buffer(Protocol):
    """Memory that the engine reads and writes where it lies; only a backend knows what it is."""

    @property
    def shape(self) -> Shape: ...

    def view(self, shape: Shape) -> Buffer:
        """Return the first elements of the same memory under another shape."""
        ...

    def row(self, index: int) -> Buffer:
        """Return batch row `index` of the same memory, as a batch of one."""
        ...

    def copy_rows(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots (axis 2) of batch row `source` over row `target`."""
        ...

    def numpy(self) -> Array:
        """Return a copy in host memory, for tests and reports."""
        ...


class Program(Protocol):
    """One opened graph."""

    def allocate(self, name: str, shape: Shape) -> Buffer:
        """Return a zeroed buffer of the type that tensor `name` has."""
        ...

    def free_memory(self) -> int | None:
        """Return the bytes that `allocate` still has; None where that is the host's memory."""
        ...

    def run(
        self,
        inputs: Mapping[str, Array],
        buffers: Mapping[str, Buffer],
        outputs: Sequence[str] | None = None,
    ) -> dict[str, Array]:
        """Run one step.

        Args:
            inputs: host arrays by input name.
            buffers: what stays in the engine's memory, by input or output name. An output bound to an
                input's buffer is written in place.
            outputs: the others that are wanted; all when None.

        Returns:
            The outputs that no buffer was given for, in arrays of their own.
        """
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """Opens graphs with one engine; its str says where they run."""

    name: str

    def artifact(self, bundle: Bundle, graph: str, precision: str | None) -> Artifact:
        """Return what this engine would open of a graph, in `precision` or the bundle's default one.

        Raises:
            InputError: the bundle has no such precision.
        """
        ...

    def open(self, bundle: Bundle, artifact: Artifact) -> Program: ...


class ArrayBuffer:
    """A `Buffer` in host memory."""

    def __init__(self, array: Array) -> None:
        self.array = array

    @property
    def shape(self) -> Shape:
        return self.array.shape

    def view(self, shape: Shape) -> ArrayBuffer:
        count = int(np.prod(shape))
        return type(self)(self.array.reshape(-1)[:count].reshape(shape))

    def row(self, index: int) -> ArrayBuffer:
        return type(self)(self.array[index : index + 1])

    def copy_rows(self, source: int, target: int, length: int) -> None:
        self.array[target, :, :length] = self.array[source, :, :length]

    def numpy(self) -> Array:
        return np.array(self.array)


class FakeProgram:
    """A `Program` that computes with a Python function: for tests, ours and users'.

    Args:
        function: maps all inputs, buffers included, to all outputs by name.
        dtype: of allocated buffers.
    """

    def __init__(
        self,
        function: Callable[[Mapping[str, Array]], Mapping[str, Array]],
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        self.function = function
        self.dtype = dtype
        self.closed = False

    def allocate(self, name: str, shape: Shape) -> Buffer:
        return ArrayBuffer(np.zeros(shape, self.dtype))

    def free_memory(self) -> int | None:
        return None

    def run(
        self,
        inputs: Mapping[str, Array],
        buffers: Mapping[str, Buffer],
        outputs: Sequence[str] | None = None,
    ) -> dict[str, Array]:
        bound = {name: buffer.array for name, buffer in buffers.items() if isinstance(buffer, ArrayBuffer)}
        results = self.function({**bound, **inputs})
        for name, value in results.items():
            if name in bound:
                # Engines refuse an output that its buffer doesn't fit; numpy would broadcast it.
                assert bound[name].shape == value.shape, (name, bound[name].shape, value.shape)
                bound[name][...] = value
        wanted = results if outputs is None else outputs
        return {name: results[name] for name in wanted if name not in bound}

    def close(self) -> None:
        self.closed = True
