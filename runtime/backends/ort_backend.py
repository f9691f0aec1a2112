"""ONNX Runtime on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..bundle.bundle import Bundle
from ..bundle.manifest import Artifact
from ..errors import BackendError, BackendUnavailableError
from .backend import Array, ArrayBuffer, Buffer, Shape


def import_onnxruntime() -> ModuleType:
    """ONNX Runtime, or an error that names the extra."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            "the ort-cpu backend needs ONNX Runtime: pip install 'planforge[cpu]'"
        ) from error
    return onnxruntime  # type: ignore[no-any-return]


class OrtBuffer(ArrayBuffer):
    """Host memory that ONNX Runtime reads and writes without a copy."""

    def __init__(self, array: Array) -> None:
        super().__init__(array)
        self.value = import_onnxruntime().OrtValue.ortvalue_from_numpy(array)  # shares the memory


class OrtProgram:
    """One ONNX graph in an ONNX Runtime session."""

    def __init__(self, path: Path, threads: int | None = None) -> None:
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.log_severity_level = 4  # errors come as exceptions, so not on stderr too
        options.intra_op_num_threads = threads if threads is not None else usable_cores()
        # Decoding runs the session token after token: workers that sleep in between cost more than they save.
        options.add_session_config_entry("session.intra_op.allow_spinning", "1")
        self.dtypes: dict[str, np.dtype[Any]] = {}
        with mapped_errors(f"ONNX Runtime cannot load {path.name}"):
            self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        for tensor in (*self.session.get_inputs(), *self.session.get_outputs()):
            if tensor.type not in NUMPY_TYPES:
                raise BackendError(
                    f"{path.name}: {tensor.name} has type {tensor.type}, which is not supported"
                )
            self.dtypes[tensor.name] = NUMPY_TYPES[tensor.type]
        self.output_names = [tensor.name for tensor in self.session.get_outputs()]

    def allocate(self, name: str, shape: Shape) -> OrtBuffer:
        return OrtBuffer(np.zeros(shape, self.dtype_of(name)))  # untouched pages take no memory

    def dtype_of(self, name: str) -> np.dtype[Any]:
        if name not in self.dtypes:
            raise BackendError(f"the graph has no tensor {name!r}; it has {', '.join(self.dtypes)}")
        return self.dtypes[name]

    def run(
        self,
        inputs: Mapping[str, Array],
        buffers: Mapping[str, Buffer],
        outputs: Sequence[str] | None = None,
    ) -> dict[str, Array]:
        binding = self.session.io_binding()
        wanted = self.output_names if outputs is None else outputs
        rest = [name for name in wanted if name not in buffers]
        with mapped_errors("ONNX Runtime failed while running"):
            for name, array in inputs.items():
                binding.bind_cpu_input(name, np.ascontiguousarray(array, self.dtype_of(name)))
            for name, buffer in buffers.items():
                assert isinstance(buffer, OrtBuffer)
                if name in self.output_names:
                    binding.bind_ortvalue_output(name, buffer.value)
                else:
                    binding.bind_ortvalue_input(name, buffer.value)
            for name in rest:
                binding.bind_output(name, "cpu")
            self.session.run_with_iobinding(binding)
        bound = [name for name in buffers if name in self.output_names] + rest
        values = zip(bound, binding.get_outputs(), strict=True)  # in the order of their binding
        return {name: value.numpy() for name, value in values if name not in buffers}

    def close(self) -> None:
        del self.session


class OrtCpuBackend:
    """Opens any ONNX graph of a bundle on the CPU."""

    name = "ort-cpu"

    def __init__(self, threads: int | None = None, verify: bool = False) -> None:
        import_onnxruntime()
        self.threads = threads
        self.verify = verify

    def open(self, bundle: Bundle, artifact: Artifact) -> OrtProgram:
        for name in artifact.data:
            bundle.path(name, verify=self.verify)
        return OrtProgram(bundle.path(artifact.file, verify=self.verify), self.threads)


@contextmanager
def mapped_errors(doing: str) -> Iterator[None]:
    """Turns ONNX Runtime's exceptions into BackendError, in one line."""
    try:
        yield
    except Exception as error:
        # Session creation raises ONNX Runtime's own exceptions, a run with IO binding RuntimeError.
        if isinstance(error, RuntimeError) or type(error).__module__.startswith("onnxruntime"):
            raise BackendError(f"{doing}: {' '.join(str(error).split())}") from error
        raise


def usable_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(bool)": np.dtype(np.bool_),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(uint8)": np.dtype(np.uint8),
}
