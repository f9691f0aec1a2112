"""An engine that computes with a Python function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from planforge.runtime.backends.backend import Array, ArrayBuffer, Arrays, BoundGraph, Buffer, Buffers, Shape


class FakeProgram:
    """A `Program` whose function maps all inputs, buffers included, to all outputs by name."""

    captures_steps = False

    def __init__(
        self,
        function: Callable[[Arrays], Arrays],
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        self.function = function
        self.dtype = dtype
        self.closed = False

    def allocate(self, name: str, shape: Shape) -> Buffer:
        return ArrayBuffer(np.zeros(shape, self.dtype))

    def free_memory(self) -> int | None:
        return None

    def run(self, inputs: Arrays, buffers: Buffers, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        bound = {name: buffer.array for name, buffer in buffers.items() if isinstance(buffer, ArrayBuffer)}
        results = self.function({**bound, **inputs})
        for name, value in results.items():
            if name in bound:
                # Engines refuse an output that its buffer doesn't fit; numpy would broadcast it.
                assert bound[name].shape == value.shape, (name, bound[name].shape, value.shape)
                bound[name][...] = value
        wanted = results if outputs is None else outputs
        return {name: results[name] for name in wanted if name not in bound}

    def bind(self, buffers: Buffers, outputs: Sequence[str] | None = None, fixed: bool = False) -> BoundGraph:
        return partial(self.run, buffers=buffers, outputs=outputs)

    def close(self) -> None:
        self.closed = True
