"""Finds NVIDIA GPUs and their driver, through NVIDIA's bindings of the CUDA runtime."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import BackendError, BackendUnavailableError, InputError

NO_DEVICE = 100  # cudaErrorNoDevice
NO_DRIVER = (
    "no NVIDIA driver was found: install it, start a container with --gpus all, or copy the bundle to a"
    " machine with a GPU"
)


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver describes it."""

    index: int
    name: str
    sm: str  # its compute capability, such as "sm86"
    memory: int  # bytes
    uuid: str = ""  # such as "GPU-1a2b...", by which NVIDIA's tools count it, whatever is visible to CUDA


def import_cuda() -> Any:
    """Return NVIDIA's bindings, or raise an error that says how to install them."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise BackendUnavailableError(
            "NVIDIA's package cuda-bindings is missing: pip install cuda-bindings, in the version of CUDA"
            " that the driver has (such as 'cuda-bindings==12.*')"
        ) from error
    return runtime


class CudaError(BackendError):
    """A call of CUDA that failed, and CUDA's number of the error."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def call_cuda(cuda: Any, function: str, *arguments: Any) -> Any:
    """Call a CUDA function and return its result; an error has CUDA's own message."""
    status, *values = getattr(cuda, function)(*arguments)
    if int(status):
        text = cuda.cudaGetErrorString(status)[1].decode()
        raise CudaError(f"{function}: {text} (CUDA error {int(status)})", int(status))
    return values[0] if values else None


def list_gpus() -> list[Gpu]:
    """Return the GPUs that can be used here, or raise an error that says what is missing or too old."""
    cuda = import_cuda()
    driver = find_driver_cuda()
    if driver == (0, 0):
        raise BackendUnavailableError(NO_DRIVER)
    needed = parse_cuda_version(call_cuda(cuda, "cudaRuntimeGetVersion"))
    try:
        count = call_cuda(cuda, "cudaGetDeviceCount")
    except CudaError as error:
        if driver < needed:
            raise BackendUnavailableError(
                "the NVIDIA driver is too old: it has CUDA {}.{}, cuda-bindings is of {}.{}; update the"
                " driver, or pip install 'cuda-bindings=={}.*'".format(*driver, *needed, driver[0])
            ) from error
        raise BackendUnavailableError(f"no NVIDIA GPU can be used: {error}") from error
    gpus = []
    for index in range(count):
        properties = call_cuda(cuda, "cudaGetDeviceProperties", index)
        name = properties.name.decode() if isinstance(properties.name, bytes) else properties.name
        sm = f"sm{properties.major}{properties.minor}"
        parts = np.split(np.frombuffer(properties.uuid.bytes, np.uint8), (4, 6, 8, 10))
        uuid = "-".join(["GPU", *(part.tobytes().hex() for part in parts)])
        gpus.append(Gpu(index, name, sm, int(properties.totalGlobalMem), uuid))
    return gpus


def find_driver_cuda() -> tuple[int, int]:
    """Return the newest version of CUDA that the driver has, such as (13, 0); (0, 0) without a driver."""
    try:
        return parse_cuda_version(call_cuda(import_cuda(), "cudaDriverGetVersion"))
    except RuntimeError:  # of cuda-bindings below 12.9
        return 0, 0


def driver_is_missing() -> bool:
    """Tell whether the driver is surely missing: its library is, or the bindings find no version of it."""
    # Looking for the library takes microseconds, importing the bindings 60 ms of every start.
    if "cuda.bindings" not in sys.modules and not has_driver_library():
        return True
    try:
        return find_driver_cuda() == (0, 0)
    except BackendUnavailableError:
        return not has_driver_library()


def has_driver_library() -> bool:
    """Return whether the driver's library is here."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def gpu_is_present() -> bool:
    """Return whether an NVIDIA GPU is here, whether or not it can be used."""
    if driver_is_missing():
        return False
    try:
        status, *count = import_cuda().cudaGetDeviceCount()
    except BackendUnavailableError:
        return True  # the bindings are missing, the driver is there
    return int(status) != NO_DEVICE and count != [0]


def parse_cuda_version(number: int) -> tuple[int, int]:
    """Return (12, 6) for CUDA's 12060."""
    return number // 1000, number % 1000 // 10


def find_gpu(index: int) -> Gpu:
    """Return the GPU of that number."""
    gpus = list_gpus()
    if not gpus:
        raise BackendUnavailableError("the NVIDIA driver finds no GPU")
    if not 0 <= index < len(gpus):
        here = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in gpus)
        raise InputError(f"device={index} does not exist; this machine has {here}")
    return gpus[index]
