"""Memory, streams and graphs of one NVIDIA GPU, through NVIDIA's bindings of the CUDA runtime."""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import math
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import BackendError, ClosedError, MemoryLimitError
from .backend import Array, Shape
from .gpus import CudaError, call_cuda, find_gpu, import_cuda

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
NOT_CAPTURABLE = range(900, 909)  # cudaErrorStreamCaptureUnsupported to cudaErrorCapturedEvent
KEEP_FREE = 0.25  # of a GPU's memory: while so much is free, what was freed is kept for calls that are alike
NON_BLOCKING = 1  # cudaStreamNonBlocking: other work on this GPU disturbs no capture


class Turns:
    """Lets threads of this process use CUDA at the same time, or one of them alone.

    ONNX Runtime captures in a mode in which a call of CUDA by any other thread fails, and ends the capture.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.depths: dict[int, int] = {}  # of the turns that a thread has within each other
        self.alone: int | None = None  # the thread that is

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        me = threading.get_ident()
        with self.changed:
            if me not in self.depths:
                self.changed.wait_for(lambda: self.alone in (None, me))
            self.depths[me] = self.depths.get(me, 0) + 1
        try:
            yield
        finally:
            with self.changed:
                self.depths[me] -= 1
                if not self.depths[me]:
                    del self.depths[me]

    @contextlib.contextmanager
    def try_alone(self) -> Iterator[bool]:
        """Yield whether no other thread has a turn; if so, none begins meanwhile. It waits for none."""
        me = threading.get_ident()
        try:
            with self.changed:
                if self.alone is None and self.depths.keys() <= {me}:
                    self.alone = me
            yield self.alone == me
        finally:
            with self.changed:
                if self.alone == me:
                    self.alone = None
                    self.changed.notify_all()


TURNS = Turns()


class Device:
    """A GPU with one stream of work. The programs of a bundle share it and take turns."""

    def __init__(self, index: int = 0) -> None:
        self.lock = threading.RLock()
        self.programs = 0  # that are open on it
        self.released: deque[tuple[int, int]] = deque()  # (size, address) of freed memory
        self.pool: dict[int, list[int]] = defaultdict(list)  # heaps of the addresses, by size
        self.unpinned: deque[int] = deque()  # freed host memory
        self.cuda = import_cuda()
        with TURNS.take():
            self.gpu = find_gpu(index)
            self.call("cudaSetDevice", self.gpu.index)
            self.stream = self.call("cudaStreamCreateWithFlags", NON_BLOCKING)
        self.streams = [self.stream]  # none after the last program has left
        left = Leftovers(self.cuda, index, self.released, self.pool, self.unpinned, self.streams)
        weakref.finalize(self, DEFERRED_FREES.append, left).atexit = False

    def call(self, function: str, *arguments: Any) -> Any:
        return call_cuda(self.cuda, function, *arguments)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let one thread at a time use this GPU, as its current device, unless it is closed by then."""
        with self.lock, TURNS.take():  # who waits for the lock has no turn, and hinders no capture
            if not self.streams:
                raise ClosedError
            self.call("cudaSetDevice", self.gpu.index)
            yield

    def synchronise(self) -> None:
        """Wait until all work on the stream is done."""
        self.call("cudaStreamSynchronize", self.stream)

    def copy_from_host(self, target: int, source: int, size: int) -> None:
        """Start a copy to the device's memory; both ends are addresses."""
        kind = self.cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.call("cudaMemcpyAsync", target, source, size, kind, self.stream)

    def copy_to_host(self, target: int, source: int, size: int) -> None:
        """Start a copy from the device's memory; both ends are addresses."""
        kind = self.cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.call("cudaMemcpyAsync", target, source, size, kind, self.stream)

    def allocate(self, size: int, what: str) -> Memory:
        """Return uninitialized device memory; `what` it is for is said where there is too little."""
        size = max(size, 1)
        with self.turn():
            self.sort_released()
            if blocks := self.pool.get(size):
                return Memory(self, heapq.heappop(blocks), size)
            free_leftovers()
            status, free, total = self.cuda.cudaMemGetInfo()
            if int(status) or free - size < KEEP_FREE * total:
                self.sweep()  # calls that are alike find what they freed; others must not find a full GPU
            try:
                return Memory(self, self.call("cudaMalloc", size), size)
            except CudaError as error:
                if error.code != OUT_OF_MEMORY:
                    raise
                free = self.free_memory()
                raise MemoryLimitError(
                    f"{self.gpu.name} has {free / 1e6:.1f} MB free of {self.gpu.memory / 1e6:.0f} MB, and"
                    f" {size / 1e6:.1f} MB are needed for {what}. Close other programs that use it, take"
                    " smaller batches, or load a smaller max_length (of a plan: build it again with --max"
                    " length=N)",
                    needed=size,
                    limit=free,
                ) from error

    def free_memory(self) -> int:
        """Return the bytes that can still be allocated, freed memory that is kept included."""
        with self.turn():
            self.sort_released()
            return self.count_free() + sum(size * len(blocks) for size, blocks in self.pool.items())

    def count_free(self) -> int:
        """Return the bytes that CUDA has free, without freed memory that is kept; 0 if it does not tell."""
        with self.turn():
            status, free, _ = self.cuda.cudaMemGetInfo()
            return 0 if int(status) else int(free)

    def release(self, address: int, size: int) -> None:
        """Keep memory for the next who wants as much; the lowest address goes first.

        So caches of one shape get the same addresses again, which captured graphs hold. Called when garbage
        is collected, in any thread, perhaps while a graph is captured: it calls nothing.
        """
        self.released.append((size, address))

    def sort_released(self) -> None:
        while self.released:
            size, address = self.released.popleft()
            heapq.heappush(self.pool[size], address)

    def sweep(self) -> None:
        """Free what was released, also by models that were dropped without being closed."""
        free_leftovers()
        with self.turn():
            self.sort_released()
            for blocks in self.pool.values():
                while blocks:
                    self.call("cudaFree", blocks.pop())
            while self.unpinned:
                self.call("cudaFreeHost", self.unpinned.pop())

    def capture(self, work: Callable[[], None]) -> Graph | None:
        """Record `work` in a graph without running it; None where it cannot be recorded."""
        mode = self.cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call("cudaStreamBeginCapture", self.stream, mode)
        try:
            work()
        except (BackendError, RuntimeError):
            status, graph = self.cuda.cudaStreamEndCapture(self.stream)
            if not int(status) and graph is not None:
                self.call("cudaGraphDestroy", graph)
            return None
        try:
            graph = self.call("cudaStreamEndCapture", self.stream)
        except CudaError as error:
            if error.code in NOT_CAPTURABLE:
                return None
            raise
        return Graph(self, graph)

    def end_capture(self) -> None:
        """Let the stream work again after a capture that another library began and that failed."""
        status, graph = self.cuda.cudaStreamEndCapture(self.stream)
        if not int(status) and graph is not None:
            self.call("cudaGraphDestroy", graph)

    def leave(self) -> None:
        """Count a program as closed; the last one frees kept memory and the stream."""
        with self.turn():
            self.programs -= 1
            self.sweep()
            if not self.programs:
                self.call("cudaStreamDestroy", self.streams.pop())


@dataclass
class Leftovers:
    """What a collected device held. Another one frees it: collection runs in any thread, or in a capture."""

    cuda: Any
    index: int
    released: deque[tuple[int, int]]
    pool: dict[int, list[int]]
    unpinned: deque[int]
    streams: list[Any]

    def free(self) -> None:
        memory = [address for _, address in self.released]
        memory += [address for blocks in self.pool.values() for address in blocks]
        calls = [("cudaSetDevice", self.index), *(("cudaFree", address) for address in memory)]
        calls += [("cudaFreeHost", address) for address in self.unpinned]
        calls += [("cudaStreamDestroy", stream) for stream in self.streams]
        for function, argument in calls:
            with contextlib.suppress(CudaError):  # nobody uses it any more
                call_cuda(self.cuda, function, argument)


DEFERRED_FREES: deque[Leftovers] = deque()


def free_leftovers() -> None:
    """Free what models held that were dropped without being closed."""
    while DEFERRED_FREES:
        DEFERRED_FREES.popleft().free()


class Graph:
    """Work that was recorded once and is started with one call, always on the same addresses."""

    def __init__(self, device: Device, graph: Any) -> None:
        self.device = device
        self.executable = device.call("cudaGraphInstantiate", graph, 0)
        device.call("cudaGraphDestroy", graph)

    def launch(self) -> None:
        self.device.call("cudaGraphLaunch", self.executable, self.device.stream)

    def close(self) -> None:
        self.device.call("cudaGraphExecDestroy", self.executable)


class Memory:
    """Device memory, free for the next buffer when nobody holds it any more."""

    def __init__(self, device: Device, address: int, size: int) -> None:
        self.device = device
        self.size = size
        self.writer: object = None  # the program whose results lie here
        self._address = int(address)
        self._finalizer = weakref.finalize(self, device.release, self._address, size)
        self._finalizer.atexit = False  # the process's end frees it

    @property
    def address(self) -> int:
        if not self._finalizer.alive:
            raise ClosedError("this GPU memory was freed")
        return self._address

    def close(self) -> None:
        self._finalizer()


class Pinned:
    """Host memory that a GPU copies from and to by itself."""

    def __init__(self, device: Device, size: int) -> None:
        self.size = max(size, 1)
        self.address = int(device.call("cudaMallocHost", self.size))
        memory = (ctypes.c_uint8 * self.size).from_address(self.address)
        self.bytes: Array = np.ctypeslib.as_array(memory)
        weakref.finalize(self, device.unpinned.append, self.address).atexit = False

    def array(self, shape: Shape, dtype: np.dtype[Any]) -> Array:
        """Return the memory's beginning as an array, without a copy."""
        count = math.prod(shape) * dtype.itemsize
        return self.bytes[:count].view(dtype).reshape(shape)
