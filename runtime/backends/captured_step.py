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
from .device_buffer import DeviceBuffer, check_buffers
from .ort_program import RUNNING, wrap_ort_errors

if TYPE_CHECKING:
    from .ort_cuda_backend import OrtCudaProgram

log = logging.getLogger("planforge")

ON_HOST = (TOTAL, WINDOW_TOTAL, "count")  # inputs that kernels read there
MAX_GRAPHS = 64  # of a program
MIN_FREE = 64 * 2**20  # bytes of the GPU's memory below which no more graphs are captured
NOT_CAPTURED = "%s: no CUDA graph can be captured of it, so each kernel is launched: %s"
NO_GRAPH = -1  # ONNX Runtime's number of a run that is neither captured nor replayed


class CapturedGraphs:
    """The numbers of a session's captured graphs, by the thread and by all that a graph depends on.

    Attributes:
        count: how many there are.
        byte_count: the memory of the GPU that their captures took.
    """

    def __init__(self, limit: int = MAX_GRAPHS) -> None:
        self.limit = limit
        self.count = 0
        self.byte_count = 0
        self._threads = threading.local()

    def find(self, key: Hashable) -> int:
        """Return the number of this thread's graph, or `NO_GRAPH`."""
        number: int = self._of_thread().get(key, NO_GRAPH)
        return number

    def add(self, key: Hashable, byte_count: int) -> None:
        """Count a graph that this thread has captured as `next_number`."""
        self._of_thread()[key] = self.next_number
        self.count += 1
        self.byte_count += max(byte_count, 0)

    @property
    def next_number(self) -> int:
        return self.count + 1

    @property
    def has_room(self) -> bool:
        return self.count < self.limit

    def _of_thread(self) -> dict[Hashable, int]:
        if not hasattr(self._threads, "numbers"):
            self._threads.numbers = {}
        numbers: dict[Hashable, int] = self._threads.numbers
        return numbers


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
        self.buffers = check_buffers(buffers, program.output_names, program)
        names = program.output_names if outputs is None else outputs
        self.outputs = tuple(name for name in names if name not in buffers)
        own = [name for name in self.outputs if name in program.output_names]
        # The session's own results: logits where something is chosen of them.
        self.results = own if len(own) == len(self.outputs) else [*own, "logits"]
        self.places = list_places(self.buffers)
        self.lengths = program.read_lengths({name: buffer.shape for name, buffer in self.buffers.items()})
        self.sizes: dict[str, Shape] = {}  # of the results
        self.binding: Any = None
        self.key: Hashable = None  # that the binding is for

    def __call__(self, inputs: Arrays) -> dict[str, Array]:
        results = self.compute(inputs)
        chosen = [name for name in self.outputs if name not in self.sizes]
        if chosen:  # in a turn of its own, as that is captured too
            logits = self.program.find_staging("logits").on_device(self.sizes["logits"])
            results |= self.program.choice.choose(logits, chosen)
        return results

    def compute(self, inputs: Arrays) -> dict[str, Array]:
        """Return the session's own results that are asked for."""
        program = self.program
        with program.turn():
            self.place(inputs)
            number = program.graphs.find(self.key)
            if number != NO_GRAPH or not program.can_capture():
                return self.run(inputs, number)
        with program.device.take_turns_alone(), program.turn():
            self.place(inputs)  # what others did meanwhile may have moved memory
            return self.capture(inputs)

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
        before = program.device.free_memory()
        try:
            results = self.run(inputs, program.graphs.next_number)
        except BackendError as error:
            if isinstance(error, ClosedError):
                raise
            program.device.end_capture()
            program.graphs.limit = 0
            log.info(NOT_CAPTURED, program.name, error)
            return self.run(inputs, NO_GRAPH)
        program.graphs.add(self.key, before - program.device.free_memory())
        return results


def list_places(buffers: Mapping[str, DeviceBuffer]) -> Hashable:
    """Return all that a captured graph holds of its memory."""
    return tuple((name, buffer.address, buffer.shape) for name, buffer in buffers.items())
