"""CUDA on host memory: the small surface of NVIDIA's bindings that the backend uses.

It is unkind on purpose. Fresh memory holds NaN; device addresses mean nothing to the host, and host addresses
nothing to the device; nothing that is asked of a stream happens before it is synchronised; a graph replays
the addresses that it was captured with.
"""
# ruff: noqa: N802, N815 (the names are CUDA's)

from __future__ import annotations

import bisect
import contextlib
import ctypes
import enum
import itertools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


class Status(enum.IntEnum):
    """Of a call: `cudaError_t`."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorInvalidDevice = 101
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureInvalidated = 901


OK = Status.cudaSuccess
FIRST_ADDRESS = 1 << 60
Work = Callable[[], None]


class IllegalAddressError(Exception):
    """A copy or kernel touched memory that is not there."""


class EmulatedCuda(ModuleType):
    """In place of the module `cuda.bindings.runtime`."""

    cudaMemcpyKind = enum.IntEnum(
        "cudaMemcpyKind",
        {"cudaMemcpyHostToDevice": 1, "cudaMemcpyDeviceToHost": 2, "cudaMemcpyDeviceToDevice": 3},
    )
    cudaStreamCaptureMode = enum.IntEnum("cudaStreamCaptureMode", {"cudaStreamCaptureModeThreadLocal": 1})

    def __init__(
        self, sm: str = "sm86", memory: int = 8 * 10**9, driver: int = 13000, count: int = 1, first: int = 0
    ) -> None:
        """Args: first: the number of the first GPU that CUDA_VISIBLE_DEVICES shows."""
        super().__init__("cuda.bindings.runtime")
        self.sm = sm
        self.memory = memory
        self.driver = driver
        self.count = count
        self.first = first
        self.blocks: dict[int, np.ndarray[Any, np.dtype[np.uint8]]] = {}
        self.pinned: dict[int, Any] = {}
        self.freed: list[Any] = []
        self.next = FIRST_ADDRESS
        self.queues: dict[int, list[Work]] = {}
        self.numbers = itertools.count(1)  # of streams
        self.captured: list[Work] | None = None
        self.calls: list[str] = []
        self.graph_launches = 0
        self.downloaded = 0  # bytes
        self.lock = threading.RLock()  # of the threads that use it at the same time
        self.sessions: list[Any] = []  # of ONNX Runtime
        self.fails_to_capture = False
        self.graph_bytes = 0  # of ONNX Runtime's captured graphs
        self.capturing_thread: int | None = None  # whose capture ends where another thread calls

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cuda"):
            self.calls.append(name)
            self.check_no_other_captures(name)
        return super().__getattribute__(name)

    def check_no_other_captures(self, what: str) -> None:
        """Refuse work of a thread while another one captures."""
        assert self.capturing_thread in (None, threading.get_ident()), f"{what} during a capture"

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Refuse calls of other threads, as a capture in CUDA's global mode does."""
        assert self.capturing_thread is None
        self.capturing_thread = threading.get_ident()
        try:
            yield
        finally:
            self.capturing_thread = None

    # What a machine has

    def cudaDriverGetVersion(self) -> tuple[Status, int]:
        return OK, self.driver

    def cudaRuntimeGetVersion(self) -> tuple[Status, int]:
        return OK, 13000

    def cudaGetDeviceCount(self) -> tuple[Status, int | None]:
        if self.driver < 13000:
            return Status.cudaErrorInsufficientDriver, None
        return (OK, self.count) if self.count else (Status.cudaErrorNoDevice, None)

    def cudaGetDeviceProperties(self, index: int) -> tuple[Status, Any]:
        major, minor = divmod(int(self.sm[2:]), 10)
        return OK, SimpleNamespace(
            name=b"Emulated GPU",
            major=major,
            minor=minor,
            totalGlobalMem=self.memory,
            index=index,
            uuid=SimpleNamespace(bytes=bytes([self.first + index] * 16)),
        )

    def cudaSetDevice(self, index: int) -> tuple[Status]:
        return (OK if 0 <= index < self.count else Status.cudaErrorInvalidDevice,)

    def cudaGetErrorString(self, status: Status) -> tuple[Status, bytes]:
        return OK, status.name.encode()

    # Memory

    @property
    def used(self) -> int:
        return sum(len(block) for block in self.blocks.values())

    def cudaMemGetInfo(self) -> tuple[Status, int, int]:
        return OK, self.memory - self.used - self.graph_bytes, self.memory

    def cudaMalloc(self, size: int) -> tuple[Status, int | None]:
        with self.lock:
            assert self.captured is None, "memory was asked for during a capture"
            if size > self.memory - self.used:
                return Status.cudaErrorMemoryAllocation, None
            address = self.next
            self.blocks[address] = np.full(size, 0xFF, np.uint8)  # NaN as fp16 and as fp32
            self.next += (size // 256 + 2) * 256  # a gap, so that what reaches past a block is seen
            return OK, address

    def cudaFree(self, address: int) -> tuple[Status]:
        with self.lock:
            assert self.captured is None, "memory was freed during a capture"
            for stream in self.queues:
                self.cudaStreamSynchronize(stream)
            return (OK if self.blocks.pop(address, None) is not None else Status.cudaErrorInvalidValue,)

    def cudaMallocHost(self, size: int) -> tuple[Status, int]:
        block = (ctypes.c_uint8 * size)(*itertools.repeat(0xFF, min(size, 64)))
        self.pinned[ctypes.addressof(block)] = block
        return OK, ctypes.addressof(block)

    def cudaFreeHost(self, address: int) -> tuple[Status]:
        block = self.pinned.pop(address)
        self.freed.append(block)  # kept, so that who still reads it finds NaN and this process goes on
        ctypes.memset(address, 0xFF, len(block))
        return (OK,)

    def at(self, address: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Device memory at an address."""
        starts = list(self.blocks)  # allocated in rising order
        index = bisect.bisect_right(starts, address) - 1
        if index < 0 or address + size > starts[index] + len(self.blocks[starts[index]]):
            raise IllegalAddressError(f"{size} bytes at {address:#x}")
        offset = address - starts[index]
        return self.blocks[starts[index]][offset : offset + size]

    # Streams and graphs

    def ask(self, stream: int, work: Work) -> tuple[Status]:
        """Queues work: it happens when the stream is synchronised."""
        (self.queues[stream] if self.captured is None else self.captured).append(work)
        return (OK,)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Status, int]:
        assert flags == 1, "a stream that waits for others cannot be captured beside them"
        self.queues[stream := next(self.numbers)] = []
        return OK, stream

    def cudaStreamDestroy(self, stream: int) -> tuple[Status]:
        del self.queues[stream]
        return (OK,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Status]:
        with self.lock:
            assert self.captured is None, "a stream was synchronised during its capture"
            queue, self.queues[stream] = self.queues[stream], []
            try:
                for work in queue:
                    work()
            except IllegalAddressError:
                return (Status.cudaErrorIllegalAddress,)
            return (OK,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[Status]:
        self.captured = []
        return (OK,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[Status, list[Work] | None]:
        captured = self.captured
        self.captured = None
        return OK, captured

    def cudaGraphInstantiate(self, graph: list[Work], flags: int) -> tuple[Status, list[Work]]:
        return OK, list(graph)

    def cudaGraphDestroy(self, graph: list[Work]) -> tuple[Status]:
        graph.clear()
        return (OK,)

    def cudaGraphExecDestroy(self, graph: list[Work]) -> tuple[Status]:
        graph.clear()
        return (OK,)

    def cudaGraphLaunch(self, graph: list[Work], stream: int) -> tuple[Status]:
        assert graph, "a graph that was destroyed was launched"
        self.graph_launches += 1
        self.queues[stream] += graph
        return (OK,)

    # Copies

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[Status]:
        return self.ask(stream, lambda: self.at(address, size).fill(value))

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> tuple[Status]:
        return self.cudaMemcpy2DAsync(target, size, source, size, size, 1, kind, stream)

    def cudaMemcpy2DAsync(
        self,
        target: int,
        pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        kind: int,
        stream: int,
    ) -> tuple[Status]:
        to_device = kind in (1, 3)
        from_device = kind in (2, 3)
        if to_device != (target >= FIRST_ADDRESS) or from_device != (source >= FIRST_ADDRESS):
            return (Status.cudaErrorInvalidValue,)

        def work() -> None:
            for row in range(rows):
                a = target + row * pitch
                b = source + row * source_pitch
                read = self.at(b, width).tobytes() if from_device else ctypes.string_at(b, width)
                if to_device:
                    self.at(a, width)[:] = np.frombuffer(read, np.uint8)
                else:
                    ctypes.memmove(a, read, width)
                    self.downloaded += width

        return self.ask(stream, work)
