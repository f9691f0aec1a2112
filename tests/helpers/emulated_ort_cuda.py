"""ONNX Runtime with a CUDA provider, on an emulated GPU: what it reads and writes there, the CPU computes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from planforge.runtime.backends import ort_backend, ort_cuda_backend

from .emulated_cuda import EmulatedCuda

PROVIDER = "CUDAExecutionProvider"


class EmulatedBinding:
    """An `IOBinding`: nothing may be bound twice, and device memory is of the size that is said."""

    def __init__(self, cuda: EmulatedCuda) -> None:
        self.cuda = cuda
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, tuple[int, tuple[int, ...]] | None] = {}
        self.results: list[Any] = []

    def bind_cpu_input(self, name: str, array: Any) -> None:
        self.inputs[name] = array

    def bind_input(self, name: str, kind: str, index: int, dtype: Any, shape: Any, pointer: int) -> None:
        assert kind == "cuda" and index == 0
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.inputs[name] = lambda: self.cuda.at(pointer, size).view(dtype).reshape(shape).copy()

    def bind_output(
        self, name: str, kind: str, index: int = 0, dtype: Any = None, shape: Any = None, pointer: int = 0
    ) -> None:
        assert (kind == "cuda") == bool(pointer)
        self.outputs[name] = (pointer, tuple(shape)) if pointer else None

    def get_outputs(self) -> list[Any]:
        return self.results


class EmulatedSession:
    """An `InferenceSession` that works on the stream it was given."""

    def __init__(self, session: Any, cuda: EmulatedCuda, providers: Sequence[Any]) -> None:
        self.session = session
        self.cuda = cuda
        self.settings: Mapping[str, str] = providers[0][1]
        self.names = [PROVIDER, "CPUExecutionProvider"]

    def get_providers(self) -> list[str]:
        return self.names

    def get_inputs(self) -> Any:
        return self.session.get_inputs()

    def get_outputs(self) -> Any:
        return self.session.get_outputs()

    def io_binding(self) -> EmulatedBinding:
        return EmulatedBinding(self.cuda)

    def run_with_iobinding(self, binding: EmulatedBinding) -> None:
        stream = int(self.settings["user_compute_stream"])
        assert self.cuda.cudaStreamSynchronize(stream)[0] == 0  # what was asked for before comes first
        feeds = {name: value() if callable(value) else value for name, value in binding.inputs.items()}
        found = self.session.run(list(binding.outputs), feeds)
        for (name, target), value in zip(binding.outputs.items(), found, strict=True):
            if target is not None:
                assert target[1] == value.shape, name
                self.cuda.at(target[0], value.nbytes)[:] = np.frombuffer(value.tobytes(), np.uint8)
            binding.results.append(SimpleNamespace(numpy=lambda value=value: value))


@contextmanager
def emulated_ort_cuda(available: bool = True, starts: bool = True, **machine: Any) -> Iterator[EmulatedCuda]:
    """A machine with a GPU and an ONNX Runtime for it.

    Args:
        available: whether it has the provider at all.
        starts: whether the provider finds its libraries.
        machine: as of `EmulatedCuda`.
    """
    cuda = EmulatedCuda(**machine)
    package = ModuleType("cuda.bindings")
    package.runtime = cuda  # type: ignore[attr-defined]
    real = ort_backend.make_session

    def make_session(path: Path, options: Any, providers: Sequence[Any], disabled: Sequence[str]) -> Any:
        if providers == ort_backend.CPU:
            return real(path, options, providers, disabled)
        session = EmulatedSession(real(path, options, ort_backend.CPU, disabled), cuda, providers)
        session.names = session.names if starts and loaded else session.names[1:]
        return session

    def preload_dlls() -> None:
        print("what only a person should read")  # as the real one does, on stdout
        loaded.append("CUDA's libraries")

    loaded: list[str] = []
    found = SimpleNamespace(
        get_available_providers=lambda: [PROVIDER] * available + ["CPUExecutionProvider"],
        preload_dlls=preload_dlls,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        patch.setitem(sys.modules, "cuda.bindings", package)
        patch.setattr(ort_backend, "make_session", make_session)
        patch.setattr(ort_cuda_backend, "import_onnxruntime", lambda: found)
        yield cuda
    assert onnxruntime.get_available_providers()  # the real one is back
