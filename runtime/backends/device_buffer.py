"""Tensors in a GPU's memory, and copies of them to and from the host's."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import ClosedError, InputError
from .backend import Array, Buffer, Shape
from .cuda_memory import Device, Memory, Pinned

MIN_STAGED = 16  # bits of the smallest size of a tensor's memory that all steps use: 64 KiB


class DeviceBuffer:
    """A `Buffer` in device memory."""

    def __init__(self, memory: Memory, shape: Shape, dtype: np.dtype[Any], offset: int = 0) -> None:
        self.memory = memory
        self.shape = shape
        self.dtype = dtype
        self.offset = offset

    @property
    def address(self) -> int:
        return self.memory.address + self.offset

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, shape: Shape) -> DeviceBuffer:
        return DeviceBuffer(self.memory, shape, self.dtype, self.offset)

    def row(self, index: int) -> DeviceBuffer:
        size = self.nbytes // self.shape[0]
        return DeviceBuffer(self.memory, (1, *self.shape[1:]), self.dtype, self.offset + index * size)

    def fill_with_zeros(self) -> None:
        device = self.memory.device
        with device.turn():
            device.call("cudaMemsetAsync", self.address, 0, self.nbytes, device.stream)

    def copy_rows(self, source: int, target: int, length: int) -> None:
        if length:
            self.copy_heads(self.row(source).address, self.row(target).address, length)

    def copy_slots(self, row: int, source: int, target: int, count: int) -> None:
        base = self.row(row).address
        slot_bytes = self.shape[3] * self.dtype.itemsize
        apart = abs(source - target)  # the most that one copy may take, whose two sides must not overlap
        for done in range(0, count, apart):
            from_address = base + (source + done) * slot_bytes
            to_address = base + (target + done) * slot_bytes
            self.copy_heads(from_address, to_address, min(apart, count - done))

    def copy_heads(self, from_address: int, to_address: int, count: int) -> None:
        """Copy so many slots of every head from one address of the device to another."""
        _, heads, slots, head_size = self.shape
        device = self.memory.device
        slot_bytes = head_size * self.dtype.itemsize
        pitch = slots * slot_bytes
        width = count * slot_bytes
        with device.turn():
            kind = device.cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
            device.call(
                "cudaMemcpy2DAsync", to_address, pitch, from_address, pitch, width, heads, kind, device.stream
            )

    def numpy(self) -> Array:
        device = self.memory.device
        array = np.empty(self.shape, self.dtype)
        with device.turn():
            device.copy_to_host(array.ctypes.data, self.address, self.nbytes)
            device.synchronise()
        return array


class DeviceProgram:
    """Base of the programs on a GPU, which take turns on their device."""

    device: Device
    closed = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Take the device's turn, unless the program was closed, perhaps while this thread waited."""
        with self.device.turn():
            if self.closed:
                raise ClosedError
            yield

    def free_memory(self) -> int | None:
        with self.turn():
            return self.device.free_memory()


def make_buffer(device: Device, name: str, shape: Shape, dtype: np.dtype[Any]) -> DeviceBuffer:
    """Return a zeroed buffer for a tensor."""
    memory = device.allocate(math.prod(shape) * dtype.itemsize, name)
    buffer = DeviceBuffer(memory, shape, dtype)
    buffer.fill_with_zeros()
    return buffer


def upload_array(device: Device, name: str, values: Array) -> DeviceBuffer:
    """Return a buffer with a copy of values."""
    buffer = DeviceBuffer(device.allocate(values.nbytes, name), values.shape, values.dtype)
    with device.turn():
        values = np.ascontiguousarray(values)
        device.copy_from_host(buffer.address, values.ctypes.data, buffer.nbytes)
        device.synchronise()  # before the values may go
    return buffer


def round_up(size: int) -> int:
    """Return the size of memory that is kept for so many bytes or more: it seldom grows, and so moves."""
    return 1 << max(MIN_STAGED, (size - 1).bit_length())


class Staging:
    """Memory of one tensor on both sides of the bus. It grows to the largest need and is kept."""

    def __init__(self, device: Device, name: str, dtype: np.dtype[Any]) -> None:
        self.device = device
        self.name = name
        self.dtype = dtype
        self.pinned: Pinned | None = None
        self.memory: Memory | None = None

    def on_device(self, shape: Shape) -> DeviceBuffer:
        size = math.prod(shape) * self.dtype.itemsize
        if self.memory is None or self.memory.size < size:
            self.memory = self.device.allocate(round_up(size), self.name)
        return DeviceBuffer(self.memory, shape, self.dtype)

    def on_host(self, shape: Shape) -> Array:
        size = math.prod(shape) * self.dtype.itemsize
        if self.pinned is None or self.pinned.size < size:
            self.pinned = Pinned(self.device, round_up(size))
        return self.pinned.array(shape, self.dtype)

    @property
    def host_address(self) -> int:
        assert self.pinned is not None  # a step's arrays are made before its launch
        return self.pinned.address

    def upload(self, shape: Shape) -> None:
        """Start the copy of the pinned array to the device."""
        target = self.on_device(shape)
        self.device.copy_from_host(target.address, self.on_host(shape).ctypes.data, target.nbytes)

    def download(self, shape: Shape) -> None:
        """Start the copy from the device to the pinned array."""
        source = self.on_device(shape)
        self.device.copy_to_host(self.on_host(shape).ctypes.data, source.address, source.nbytes)


def check_buffers(
    buffers: Mapping[str, Buffer], written: Collection[str], writer: object
) -> dict[str, DeviceBuffer]:
    """Return the same buffers, checked to be on a device, and to be written by no other program."""
    on_device = {}
    for name, buffer in buffers.items():
        if not isinstance(buffer, DeviceBuffer):
            raise InputError(
                f"buffer {name!r} is a {type(buffer).__name__}, not GPU memory: allocate it with the"
                " program that runs on it"
            )
        if name in written:
            if buffer.memory.writer not in (None, writer):
                raise InputError(
                    f"buffer {name!r} is the cache of another program or plan; two cannot share one, so"
                    " allocate one for each"
                )
            buffer.memory.writer = writer
        on_device[name] = buffer
    return on_device
