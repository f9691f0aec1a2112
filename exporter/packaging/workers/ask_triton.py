"""Answers questions with a package's Triton models, in a stand-in for the server.

The stand-in reads each config.pbtxt, holds what models take and give to it, and calls them as the server's
backends do: model.py by `triton_backend`, and a graph in ONNX Runtime. It is not a server: no request leaves
the process, and it reads only those settings of a configuration that packages write.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from answers import Answer, Answers, answer_questions
from pbtxt import read_pbtxt
from triton_backend import InferenceRequest, InferenceResponse, Sender, install_utilities

SECONDS = 300.0  # that a stream may take
BACKENDS = ("python", "onnxruntime")
TYPES = {
    "TYPE_STRING": "object",
    "TYPE_FP32": "float32",
    "TYPE_FP16": "float16",
    "TYPE_INT64": "int64",
    "TYPE_INT32": "int32",
    "TYPE_BOOL": "bool",
}
ORT_TYPES = {"float32": "float", "float16": "float16", "int64": "int64", "int32": "int32", "bool": "bool"}


class Config:
    """A model's config.pbtxt."""

    def __init__(self, place: Path) -> None:
        fields = read_pbtxt((place / "config.pbtxt").read_text(encoding="utf-8"))
        self.fields = fields
        self.name = place.name
        self.inputs = {entry["name"]: entry for entry in fields["input"]}
        self.outputs = {entry["name"]: entry for entry in fields["output"]}
        self.max_batch_size = fields["max_batch_size"]
        self.decoupled = fields.get("model_transaction_policy", {}).get("decoupled", False)
        if fields["name"] != place.name:
            self.refuse(f"its name is {fields['name']!r}, and its folder's {place.name!r}")
        if fields["backend"] not in BACKENDS:
            self.refuse(f"its backend {fields['backend']!r} is not one of {', '.join(BACKENDS)}")
        for entry in (*self.inputs.values(), *self.outputs.values()):
            if entry["data_type"] not in TYPES:
                self.refuse(f"{entry['name']} has the unknown type {entry['data_type']}")

    def refuse(self, why: str) -> None:
        raise RuntimeError(f"model {self.name}: config.pbtxt: {why}")

    def check_inputs(self, arrays: dict[str, Any]) -> None:
        """Refuse a request whose inputs are not the configuration's."""
        needed = {name for name, entry in self.inputs.items() if not entry.get("optional", False)}
        self.check_names("input", set(arrays), needed)
        for name, array in arrays.items():
            self.check_tensor(self.inputs[name], array)

    def check_outputs(self, arrays: dict[str, Any]) -> None:
        """Refuse a response whose outputs are not the configuration's."""
        self.check_names("output", set(arrays), set(self.outputs))
        for name, array in arrays.items():
            self.check_tensor(self.outputs[name], array)

    def check_names(self, kind: str, given: set[str], needed: set[str]) -> None:
        """Refuse tensors whose names the configuration lacks, and missing tensors."""
        known = self.inputs if kind == "input" else self.outputs
        if unknown := given - known.keys():
            self.refuse(f"it has no {kind} {', '.join(sorted(unknown))}, only {', '.join(known)}")
        if missing := needed - given:
            self.refuse(f"its {kind} {', '.join(sorted(missing))} is missing")

    def check_tensor(self, entry: Answer, array: Any) -> None:
        """Refuse an array of another type or shape; the batch's axis is not among the dims."""
        shape = array.shape[1:] if self.max_batch_size else array.shape
        dims = entry["dims"]
        fits = len(shape) == len(dims) and all(d in (-1, size) for d, size in zip(dims, shape))  # noqa: B905
        if str(array.dtype) != TYPES[entry["data_type"]] or not fits:
            told = f"{entry['name']} is {entry['data_type']} {dims}"
            self.refuse(f"{told}, and the model's is {array.dtype} {list(shape)}")


class TextModel:
    """The model that takes texts: model.py, as the python backend runs it."""

    def __init__(self, place: Path) -> None:
        self.config = Config(place)
        install_utilities()
        spec = importlib.util.spec_from_file_location("model", place / "1" / "model.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.model = module.TritonPythonModel()
        parameters = {entry["key"]: entry["value"] for entry in self.config.fields["parameters"]}
        config = json.dumps({**self.config.fields, "parameters": parameters})
        self.model.initialize({"model_config": config, "model_repository": str(place), "model_version": "1"})

    def answer(self, items: list[dict[str, str]]) -> list[dict[str, Any]]:
        """Answer requests that arrive at the same time; their texts are given by the names of inputs."""
        requests = []
        for texts in items:
            shape = (1, 1) if self.config.max_batch_size else (1,)
            inputs = {name: np.array([text.encode()], object).reshape(shape) for name, text in texts.items()}
            self.config.check_inputs(inputs)
            requests.append(InferenceRequest(inputs))
        size = self.config.max_batch_size or len(requests)
        responses: list[InferenceResponse] = []
        for begin in range(0, len(requests), size):
            given = self.model.execute(requests[begin : begin + size])
            if (given is None) != self.config.decoupled:
                self.config.refuse("decoupled is for a model that sends its responses, and for no other")
            responses += given or []
        if self.config.decoupled:
            return [self.join(request.sender) for request in requests]
        return [self.read(response) for response in responses]

    def join(self, sender: Sender) -> Answer:
        """Return a stream's text, tokens and reason."""
        if not sender.closed.wait(SECONDS):
            raise TimeoutError(f"the model did not finish its answer within {SECONDS} s")
        parts = [self.read(response) for response in sender.responses]
        return {
            "TEXT": "".join(part["TEXT"] for part in parts),
            "TOKEN_IDS": [int(token) for part in parts for token in part["TOKEN_IDS"]],
            "FINISH_REASON": parts[-1]["FINISH_REASON"],
        }

    def read(self, response: InferenceResponse) -> dict[str, Any]:
        """Return a response's outputs: a text where it is one, else the array."""
        if response.has_error():
            raise RuntimeError(str(response.error()))
        arrays = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        self.config.check_outputs(arrays)
        return {
            name: array.reshape(-1)[0].decode() if array.dtype == object else array
            for name, array in arrays.items()
        }


class GraphModel:
    """An encoder's graph, as the onnxruntime backend runs it."""

    def __init__(self, place: Path) -> None:
        self.config = Config(place)
        self.session = onnxruntime.InferenceSession(
            place / "1" / "model.onnx", providers=["CPUExecutionProvider"]
        )
        for kind, entries, tensors in (
            ("input", self.config.inputs, self.session.get_inputs()),
            ("output", self.config.outputs, self.session.get_outputs()),
        ):
            self.config.check_names(kind, {t.name for t in tensors}, set(entries))
            for tensor in tensors:
                self.check_graph(entries[tensor.name], tensor)

    def check_graph(self, entry: Answer, tensor: Any) -> None:
        """Refuse a graph's tensor of another type or shape."""
        dims = [size if isinstance(size, int) else -1 for size in tensor.shape]
        wanted = f"tensor({ORT_TYPES.get(TYPES[entry['data_type']])})"
        if tensor.type != wanted or dims != entry["dims"]:
            told = f"{entry['name']} is {entry['data_type']} {entry['dims']}"
            self.config.refuse(f"{told}, and the graph's is {tensor.type} {dims}")

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return all outputs by their names."""
        feeds = {
            name: np.array(values, TYPES[self.config.inputs[name]["data_type"]])
            for name, values in inputs.items()
        }
        self.config.check_inputs(feeds)
        names = list(self.config.outputs)
        arrays = dict(zip(names, self.session.run(names, feeds)))  # noqa: B905
        self.config.check_outputs(arrays)
        return arrays


class Repository:
    """The models of a package."""

    def __init__(self, folder: str, name: str) -> None:
        self.text_model = TextModel(Path(folder) / name)
        graph = Path(folder) / f"{name}_graph"
        self.graph_model = GraphModel(graph) if graph.exists() else None

    def answer(self, question: Answer, answers: Answers) -> Answer:
        """Answer texts, as requests that arrive at the same time."""
        items = [
            {**texts, "OPTIONS": json.dumps(options)}
            for texts, options in zip(question["items"], question["options"])  # noqa: B905
        ]
        results = [
            {name: answers.keep(v) if isinstance(v, np.ndarray) else v for name, v in own.items()}
            for own in self.text_model.answer(items)
        ]
        return {"results": results}

    def run_graph(self, question: Answer, answers: Answers) -> Answer:
        """Answer all outputs of the graph."""
        assert self.graph_model is not None
        outputs = self.graph_model.run(question["inputs"])
        return {"outputs": {name: answers.keep(array) for name, array in outputs.items()}}


def open_package(folder: str, options: Answer, questions: list[Answer]) -> tuple[str, Repository]:
    del questions
    version = f"onnxruntime {onnxruntime.__version__}, in a stand-in for the server"
    return version, Repository(folder, options["name"])


if __name__ == "__main__":
    answer_questions(open_package)
