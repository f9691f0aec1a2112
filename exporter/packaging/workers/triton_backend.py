"""A stand-in for `triton_python_backend_utils`, with the parts that Triton's documentation describes."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

FINAL = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Tensor:
    """An input or output."""

    def __init__(self, name: str, array: Any) -> None:
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class TritonError(Exception):
    """An error of a request."""

    def message(self) -> str:
        return str(self)


class InferenceResponse:
    """A response, with outputs or an error."""

    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self._outputs = output_tensors or []
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Sender:
    """Collects the responses of a decoupled request."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.closed = threading.Event()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.closed.is_set():
            raise RuntimeError("a response behind the final one")
        if response is not None:
            self.responses.append(response)
        if flags & FINAL:
            self.closed.set()


class InferenceRequest:
    """The inputs of a request."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self._inputs = [Tensor(name, array) for name, array in inputs.items()]
        self.sender = Sender()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def get_response_sender(self) -> Sender:
        return self.sender


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def install_utilities() -> None:
    """Let `import triton_python_backend_utils` find this stand-in."""
    module = types.ModuleType("triton_python_backend_utils")
    module.__dict__.update(
        Tensor=Tensor,
        TritonError=TritonError,
        InferenceResponse=InferenceResponse,
        InferenceRequest=InferenceRequest,
        get_input_tensor_by_name=get_input_tensor_by_name,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    )
    sys.modules[module.__name__] = module
