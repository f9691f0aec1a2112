"""Tensors in a GPU's memory, and copies of them to and from the host's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ..errors import InputError
from .backend import Array, Buffer, Shape
from .cuda_memory import Device, Memory, Pinned


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
        return int(np.prod(self.shape)) * self.dtype.itemsize

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
        _, heads, slots, head_size = self.shape
        device = self.memory.device
        one = head_size * self.dtype.itemsize
        if not length:
            return
        with device.turn():
            kind = device.cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
            to = self.row(target).address
            start = self.row(source).address
            pitch = slots * one
            width = length * one
            device.call("cudaMemcpy2DAsync", to, pitch, start, pitch, width, heads, kind, device.stream)

    def numpy(self) -> Array:
        device = self.memory.device
        array = np.empty(self.shape, self.dtype)
        with device.turn():
            kind = device.cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
            device.call("cudaMemcpyAsync", array.ctypes.data, self.address, self.nbytes, kind, device.stream)
            device.synchronise()
        return array


def new_buffer(device: Device, name: str, shape: Shape, dtype: np.dtype[Any]) -> DeviceBuffer:
    """Return a zeroed buffer for a tensor."""
    memory = device.allocate(int(np.prod(shape)) * dtype.itemsize, name)
    buffer = DeviceBuffer(memory, shape, dtype)
    buffer.fill_with_zeros()
    return buffer


def upload_array(device: Device, name: str, values: Array) -> DeviceBuffer:
    """Return a buffer with a copy of values."""
    buffer = DeviceBuffer(device.allocate(values.nbytes, name), values.shape, values.dtype)
    with device.turn():
        kind = device.cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        values = np.ascontiguousarray(values)
        device.call("cudaMemcpyAsync", buffer.address, values.ctypes.data, buffer.nbytes, kind, device.stream)
        device.synchronise()  # before the values may go
    return buffer


class Staging:
    """Memory of one tensor on both sides of the bus. It grows to the largest need and is kept."""

    def __init__(self, device: Device, name: str, dtype: np.dtype[Any]) -> None:
        self.device = device
        self.name = name
        self.dtype = dtype
        self.pinned: Pinned | None = None
        self.memory: Memory | None = None

    def on_device(self, shape: Shape) -> DeviceBuffer:
        """Return device memory of a shape."""
        size = int(np.prod(shape)) * self.dtype.itemsize
        if self.memory is None or self.memory.size < size:
            self.memory = self.device.allocate(size, self.name)
        return DeviceBuffer(self.memory, shape, self.dtype)

    def on_host(self, shape: Shape) -> Array:
        """Return pinned memory of a shape."""
        size = int(np.prod(shape)) * self.dtype.itemsize
        if self.pinned is None or self.pinned.size < size:
            self.pinned = Pinned(self.device, size)
        return self.pinned.array(shape, self.dtype)

    @property
    def host_address(self) -> int:
        assert self.pinned is not None  # a step's arrays are made before its launch
        return self.pinned.address

    def upload(self, shape: Shape) -> None:
        """Start the copy of the pinned array to the device."""
        device = self.device
        to = self.on_device(shape)
        kind = device.cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        host = self.on_host(shape).ctypes.data
        device.call("cudaMemcpyAsync", to.address, host, to.nbytes, kind, device.stream)

    def download(self, shape: Shape) -> None:
        """Start the copy from the device to the pinned array."""
        device = self.device
        source = self.on_device(shape)
        kind = device.cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        host = self.on_host(shape).ctypes.data
        device.call("cudaMemcpyAsync", host, source.address, source.nbytes, kind, device.stream)


def device_buffers(
    buffers: Mapping[str, Buffer], written: Collection[str], writer: object
) -> dict[str, DeviceBuffer]:
    """Return the same buffers, checked to be on a device.

    Args:
        written: names of the buffers that a program writes.
        writer: that program; no other program writes its buffers.
    """
    found = {}
    for name, buffer in buffers.items():
        if not isinstance(buffer, DeviceBuffer):
            raise InputError(
                f"buffer {name!r} is a {type(buffer).__name__}, not memory of the GPU: allocate it with the"
                " program that runs on it"
            )
        if name in written:
            if buffer.memory.writer not in (None, writer):
                raise InputError(
                    f"buffer {name!r} is the cache of another program or plan; two cannot share one, so"
                    " allocate one for each"
                )
            buffer.memory.writer = writer
        found[name] = buffer
    return found
