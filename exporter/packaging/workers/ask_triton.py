"""Answers questions with a package's Triton models, in a stand-in for the server's python backend.

The stand-in has what the backend documents of `triton_python_backend_utils`, and calls the model as the
server does. It is no server: no configuration is read by Triton, and no request crosses a process.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
from answers import Answer, Answers, answer_questions

FINAL = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL
SECONDS = 300.0


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
    """What went wrong with a request."""

    def message(self) -> str:
        return str(self)


class InferenceResponse:
    """Outputs, or an error."""

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
    """Let `import triton_python_backend_utils` find what the backend documents."""
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


class Repository:
    """The model of a repository that takes texts."""

    def __init__(self, folder: str, name: str) -> None:
        install_utilities()
        place = Path(folder) / name
        spec = importlib.util.spec_from_file_location("model", place / "1" / "model.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.model = module.TritonPythonModel()
        config = read_config((place / "config.pbtxt").read_text(encoding="utf-8"))
        self.decoupled = config["decoupled"]
        self.model.initialize(
            {"model_config": json.dumps(config), "model_repository": str(place), "model_version": "1"}
        )

    def answer(self, question: Answer, answers: Answers) -> Answer:
        """Answer texts, as requests that are there at the same time."""
        requests = []
        for text, options in zip(question["texts"], question["options"]):  # noqa: B905
            given = {"TEXT": text, "OPTIONS": json.dumps(options)}
            shape = (1,) if self.decoupled else (1, 1)
            inputs = {
                name: np.array([value.encode()], object).reshape(shape) for name, value in given.items()
            }
            requests.append(InferenceRequest(inputs))
        responses = self.model.execute(requests)
        if self.decoupled:
            assert responses is None
            return {"results": [self.join(request.sender) for request in requests]}
        outputs = [read_outputs(response) for response in responses]
        kept = [
            {name: answers.keep(v) if isinstance(v, np.ndarray) else v for name, v in own.items()}
            for own in outputs
        ]
        return {"results": kept}

    def join(self, sender: Sender) -> Answer:
        """Return a stream's text, tokens and reason."""
        if not sender.closed.wait(SECONDS):
            raise TimeoutError("an answer had no end")
        parts = [read_outputs(response) for response in sender.responses]
        return {
            "TEXT": "".join(part["TEXT"] for part in parts),
            "TOKEN_IDS": [int(token) for part in parts for token in part["TOKEN_IDS"]],
            "FINISH_REASON": parts[-1]["FINISH_REASON"],
        }


def read_config(text: str) -> Answer:
    """Return what model.py reads of config.pbtxt, as the server gives it."""
    found = re.findall(r'key: "(\w+)", value: \{ string_value: "([^"]*)" \}', text)
    return {
        "parameters": {key: {"string_value": value} for key, value in found},
        "decoupled": "decoupled: true" in text,
    }


def read_outputs(response: InferenceResponse) -> dict[str, Any]:
    """Return a response's outputs: a text where it is one, else the array."""
    if response.has_error():
        raise RuntimeError(str(response.error()))
    outputs = {}
    for tensor in response.output_tensors():
        array = tensor.as_numpy()
        outputs[tensor.name()] = array.reshape(-1)[0].decode() if array.dtype == object else array
    return outputs


def open_package(folder: str, options: Answer, questions: list[Answer]) -> tuple[str, Repository]:
    del questions
    return "a stand-in for its python backend", Repository(folder, options["name"])


if __name__ == "__main__":
    answer_questions(open_package)
