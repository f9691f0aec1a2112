"""Steps that ONNX Runtime captures in a CUDA graph, which launches all of their kernels with one call.

A captured graph holds the addresses, the shapes and the values on the host that it was captured with, so it
is replayed for the same alone; what lies at the addresses may change. ONNX Runtime keeps a graph for the
thread that captured it, and frees it when the session is closed. A call of CUDA by another thread during a
capture ends it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..bundle.artifact import TOTAL, WINDOW_TOTAL
from ..errors import BackendError, ClosedError
from .backend import Array, Arrays, Buffers, Shape
from .cuda_memory import TURNS, Device
from .device_buffer import DeviceBuffer, check_buffers
from .ort_program import RUNNING, wrap_ort_errors

if TYPE_CHECKING:
    from .ort_cuda_backend import OrtCudaProgram

log = logging.getLogger("planforge")

ON_HOST = (TOTAL, WINDOW_TOTAL, "count")  # inputs that kernels read there
MAX_GRAPHS = 64  # of a program, and the steps that a thread knows from before
MIN_FREE = 64 * 2**20  # bytes of the GPU's memory below which no more graphs are captured
NOT_CAPTURED = "%s: no CUDA graph can be captured of it, so each kernel is launched: %s"
NO_ROOM = "%s: %d CUDA graphs are captured, and no more: steps of further shapes launch each kernel"
LOGITS = "logits"
NO_GRAPH = -1  # ONNX Runtime's number of a run that is neither captured nor replayed


class ThreadGraphs(threading.local):
    """What one thread has captured, and what it may capture next."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.seen: dict[Hashable, None] = {}  # the last steps that ran without a graph


class CapturedGraphs:
    """The numbers of a session's captured graphs, by the thread and by all that a graph depends on.

    Attributes:
        count: how many there are.
        byte_count: the memory of the GPU that their captures took.
    """

    def __init__(self, name: str) -> None:
        self.name = name  # of the program
        self.limit = MAX_GRAPHS
        self.count = 0
        self.byte_count = 0
        self._last_number = 0
        self._thread = ThreadGraphs()

    def find(self, key: Hashable) -> int:
        """Return the number of this thread's graph, or `NO_GRAPH`."""
        return self._thread.numbers.get(key, NO_GRAPH)

    def is_due(self, key: Hashable, device: Device) -> bool:
        """Return whether a step without a graph is to be captured: it came before, and there is room."""
        seen = self._thread.seen
        if key not in seen:  # a shape that comes once is not worth a graph
            seen[key] = None
            if len(seen) > MAX_GRAPHS:
                del seen[next(iter(seen))]
            return False
        if self._last_number < self.limit:
            return device.count_free() >= MIN_FREE
        if self.limit:
            self.limit = 0  # so that this is said once
            log.warning(NO_ROOM, self.name, self.count)
        return False

    def take_number(self) -> int:
        """Return a number that no run has had, so that one that was interrupted cannot be replayed."""
        self._last_number += 1
        return self._last_number

    def add(self, key: Hashable, number: int, byte_count: int) -> None:
        """Keep the number of a graph that this thread has captured."""
        self._thread.seen.pop(key, None)
        self._thread.numbers[key] = number
        self.count += 1
        self.byte_count += max(byte_count, 0)


class CapturedStep:
    """A graph whose calls have few shapes, each of which is captured once.

    Inputs and results go through pinned memory, but for `ON_HOST`, whose values belong to the graph.

    Args:
        program: the graph.
        buffers: by input or output name.
        outputs: that are returned, candidates for the next token among them; all unless given.
    """

    def __init__(self, program: OrtCudaProgram, buffers: Buffers, outputs: Sequence[str] | None) -> None:
        self.program = program
        names = program.output_names if outputs is None else outputs
        self.outputs = tuple(name for name in names if name not in buffers)
        own = [name for name in self.outputs if name in program.output_names]
        # The session's own results: logits where something is chosen of them.
        self.results = own if len(own) == len(self.outputs) else [*own, LOGITS]
        self.sizes: dict[str, Shape] = {}  # of the results
        self.binding: Any = None
        self.key: Hashable = None  # that the binding is for
        self.use(buffers)

    def use(self, buffers: Buffers) -> None:
        """Take other buffers of the same names."""
        self.buffers = check_buffers(buffers, self.program.output_names, self.program)
        self.places = list_places(self.buffers)
        self.lengths = self.program.read_lengths(
            {name: buffer.shape for name, buffer in self.buffers.items()}
        )

    def __call__(self, inputs: Arrays) -> dict[str, Array]:
        program = self.program
        with program.turn():
            results = self.compute(inputs)
            chosen = [name for name in self.outputs if name not in self.sizes]
            if chosen:
                logits = program.find_staging(LOGITS).on_device(self.sizes[LOGITS])
                results |= program.choice.choose(logits, chosen)
            return results

    def compute(self, inputs: Arrays) -> dict[str, Array]:
        """Return the session's own results that are asked for."""
        graphs = self.program.graphs
        self.place(inputs)
        number = graphs.find(self.key)
        if number != NO_GRAPH or not graphs.is_due(self.key, self.program.device):
            return self.run(inputs, number)
        with TURNS.try_alone() as is_alone:
            return self.capture(inputs) if is_alone else self.run(inputs, NO_GRAPH)

    def place(self, inputs: Arrays) -> None:
        """Find the memory of all inputs and results; bind them where they are not bound to it."""
        program = self.program
        on_device = {name: array.shape for name, array in inputs.items() if name not in ON_HOST}
        on_host = {name: array for name, array in inputs.items() if name in ON_HOST}
        values = {name: int(array.item()) for name, array in on_host.items()}
        lengths = {**self.lengths, **values, **program.read_lengths(on_device)}
        self.sizes = program.infer_shapes(self.results, lengths)
        memory = {
            name: program.find_staging(name).on_device(shape)
            for name, shape in (*on_device.items(), *self.sizes.items())
        }
        key = (self.places, list_places(memory), tuple(values.items()))
        if key != self.key:
            self.binding = self.key = None
            self.bind({**self.buffers, **memory}, on_host)
            self.key = key

    def bind(self, memory: Mapping[str, DeviceBuffer], on_host: Arrays) -> None:
        binding = self.program.find_session().io_binding()
        with wrap_ort_errors("ONNX Runtime cannot bind its buffers"):
            for name, buffer in memory.items():
                self.program.bind_buffer(binding, name, buffer)
            for name, array in on_host.items():
                binding.bind_cpu_input(name, np.ascontiguousarray(array, self.program.find_dtype(name)))
        self.binding = binding

    def run(self, inputs: Arrays, number: int) -> dict[str, Array]:
        """Upload, compute and download; the number is of the graph that is replayed or captured."""
        program = self.program
        for name, array in inputs.items():
            if name not in ON_HOST:
                staging = program.find_staging(name)
                staging.on_host(array.shape)[...] = array
                staging.upload(array.shape)
        with wrap_ort_errors(RUNNING):
            program.run_numbered(self.binding, number)
        wanted = {name: size for name, size in self.sizes.items() if name in self.outputs}
        for name, size in wanted.items():
            program.find_staging(name).download(size)
        if wanted:
            program.device.synchronise()
        return {name: program.find_staging(name).on_host(size).copy() for name, size in wanted.items()}

    def capture(self, inputs: Arrays) -> dict[str, Array]:
        """Run and capture; where that fails, run without, as all later steps will."""
        program = self.program
        graphs = program.graphs
        before = program.device.count_free()
        number = graphs.take_number()
        try:
            results = self.run(inputs, number)
        except ClosedError:
            raise
        except BackendError as error:
            program.device.end_capture()
            graphs.limit = 0
            log.warning(NOT_CAPTURED, program.name, error)
            return self.run(inputs, NO_GRAPH)
        graphs.add(self.key, number, before - program.device.count_free())
        return results


def list_places(buffers: Mapping[str, DeviceBuffer]) -> Hashable:
    """Return all that a captured graph holds of its memory."""
    return tuple((name, buffer.address, buffer.shape) for name, buffer in buffers.items())
