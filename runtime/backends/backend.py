"""The interface between decoding and engines, which implement it without an import from here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ..bundle.bundle import Bundle
from ..bundle.manifest import Artifact
from ..errors import ClosedError
from ..memory_budget import MemoryBudget

Array: TypeAlias = npt.NDArray[Any]
Arrays: TypeAlias = Mapping[str, Array]  # by the names of a graph's inputs or outputs
Buffers: TypeAlias = "Mapping[str, Buffer]"
Shape: TypeAlias = tuple[int, ...]
BoundGraph: TypeAlias = Callable[[Arrays], dict[str, Array]]  # runs a graph that has its buffers already


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """The options of one `load`; `LoadOptions` says what they mean."""

    backend: str = "auto"
    precision: str | None = None
    threads: int | None = None
    max_length: int | None = None
    memory_limit: int | None = None
    verify: bool = False
    device: int = 0
    cpu_nodes: bool = False
    prepared: bool | Literal["auto"] = "auto"
    index: str | Path | None = None
    index_keys: str | Path | None = None


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

    def copy_slots(self, row: int, source: int, target: int, count: int) -> None:
        """Copy `count` slots (axis 2) of a batch row, from one slot on, over those from another on.

        They may overlap where the target comes first.
        """
        ...

    def numpy(self) -> Array:
        """Return a copy in host memory, for tests and reports."""
        ...


class Program(Protocol):
    """One opened graph."""

    @property
    def captures_steps(self) -> bool:
        """Return whether what is bound as `fixed` is captured once for each shape."""
        ...

    def allocate(self, name: str, shape: Shape) -> Buffer:
        """Return a zeroed buffer of the type that tensor `name` has."""
        ...

    def free_memory(self) -> int | None:
        """Return the bytes that `allocate` still has; None where that is the host's memory."""
        ...

    def run(self, inputs: Arrays, buffers: Buffers, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Run one step; return those of `outputs`, or of all, that no buffer was given for, in new arrays.

        Inputs are host arrays. Buffers stay in the engine's memory, by input or output name; an output bound
        to an input's buffer is written in place.
        """
        ...

    def bind(self, buffers: Buffers, outputs: Sequence[str] | None = None, fixed: bool = False) -> BoundGraph:
        """Return `run` with buffers and outputs that stay the same, for a graph that runs many times.

        With `fixed` its inputs have few shapes, and scalars that are read on the host have few values. What
        it returns may lie in the memory of an earlier result that nobody refers to any more.
        """
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """Opens graphs with one engine; its str says where they run."""

    name: str
    # Whether it computes what is stored in fp16 in fp32: its weights then take twice the size of their file.
    widens_half: bool
    openings: int  # how many graphs it opens at one time

    def artifact(self, bundle: Bundle, graph: str, precision: str | None) -> Artifact:
        """Return what this engine would open of a graph, in `precision` or the bundle's default one."""
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

    def copy_slots(self, row: int, source: int, target: int, count: int) -> None:
        slots = self.array[row]  # numpy minds what overlaps
        slots[:, target : target + count] = slots[:, source : source + count]

    def numpy(self) -> Array:
        return np.array(self.array)


class GraphRunner:
    """Base of what runs an opened graph, within a budget of memory."""

    def __init__(self, program: Program, artifact: Artifact, budget: MemoryBudget | None = None) -> None:
        self.program = program
        self.artifact = artifact
        self.budget = MemoryBudget(None) if budget is None else budget
        self.closed = False
        self.lock = threading.Lock()  # of the one thread at a time that reaches the engine

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let one thread at a time reach the engine, unless it is gone."""
        with self.lock:
            self.check_open()
            yield

    def check_open(self) -> None:
        """Refuse an engine that is gone."""
        if self.closed:
            raise ClosedError

    def close(self) -> None:
        """Free the engine; closing twice is fine."""
        with self.lock:
            if not self.closed:
                self.closed = True
                self.program.close()
        self.budget.close()
