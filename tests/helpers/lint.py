"""Small graphs for lint, and what TensorRT-RTX's own parser and builder make of them.

Run as a script it is the child process that parses and builds: the library may abort.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RANGE = (1, 2, 4)  # of an axis that a case says nothing of


@dataclass(frozen=True)
class Case:
    """A graph, and what is expected of it.

    Attributes:
        name: of the test.
        rule: that it breaks; "" if it is good.
        body: ONNX text.
        opset: of ONNX's operators.
        domains: other domains that it imports.
        ranges: minimum, optimum and maximum of axes in the profile.
        ir: the model's ir_version.
    """

    name: str
    rule: str
    body: str
    opset: int = 20
    domains: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    ir: int = 10


def model_of(case: Case) -> Any:
    """The graph as a ModelProto."""
    import onnx.parser

    imports = "".join(f', "{domain}" : 1' for domain in case.domains)
    head = f'<ir_version: {case.ir}, opset_import: ["" : {case.opset}{imports}]>'
    return onnx.parser.parse_model(f"{head}\ng {case.body}")


def write_case(case: Case, folder: Path) -> Path:
    """Writes the graph as NAME.onnx."""
    path = folder / f"{case.name}.onnx"
    path.write_bytes(model_of(case).SerializeToString())
    return path


def verdicts_of(cases: Sequence[Case], folder: Path) -> dict[str, dict[str, Any]]:
    """What the parser and the builder say of each case, by name."""
    return ask([(case.name, str(write_case(case, folder)), dict(case.ranges)) for case in cases], folder)


def ask(graphs: Sequence[tuple[str, str, Mapping[str, Any]]], folder: Path) -> dict[str, dict[str, Any]]:
    """What the parser and the builder say of each graph, by name.

    Args:
        graphs: name, path, and the ranges of axes.
        folder: for the request to the child process.

    Returns:
        "parsed", "built", "why", "unused" inputs, "layers" as (type, type of the output), and the plan's
        "bytes". A graph that killed the process is neither parsed nor built.
    """
    found: dict[str, dict[str, Any]] = {}
    waiting = list(graphs)
    while waiting:
        request = folder / "request.json"
        request.write_text(json.dumps(waiting), encoding="utf-8")
        command = [sys.executable, str(Path(__file__)), str(request)]
        child = subprocess.run(command, capture_output=True, encoding="utf-8")
        answers = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
        found |= {answer["name"]: answer for answer in answers}
        waiting = waiting[len(answers) :]
        if waiting:
            name = waiting.pop(0)[0]
            found[name] = {"parsed": False, "built": False, "why": f"died: {child.stderr[-300:]}"}
    return found


def main(request: Path) -> None:
    """The child process: a line of JSON for each case."""
    for name, path, ranges in json.loads(request.read_text(encoding="utf-8")):
        print(json.dumps({"name": name, **verdict(path, ranges)}), flush=True)


def verdict(path: str, ranges: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    trt: Any = importlib.import_module("tensorrt_rtx")

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR and "cudaError 35" not in message:
                self.errors.append(message[:300])

    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(path):
        return {"parsed": False, "built": False, "why": log.errors[:2]}
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    read = [layer.get_input(i) for layer in layers for i in range(layer.num_inputs)]
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    used = {tensor.name for tensor in read if tensor is not None}
    answer = {
        "parsed": True,
        "unused": [tensor.name for tensor in inputs if tensor.name not in used],
        "layers": [(la.type.name, la.get_output(0).dtype.name) for la in layers if la.num_outputs],
    }
    for layer in layers:
        if layer.type.name == "ATTENTION_INPUT":
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM86, 0)
    add_profile(builder, config, inputs, ranges)
    plan = builder.build_serialized_network(network, config)
    built = {"built": plan is not None, "bytes": 0 if plan is None else plan.nbytes}
    return {**answer, **built, "why": log.errors[:2]}


def add_profile(
    builder: Any, config: Any, inputs: Sequence[Any], ranges: Mapping[str, Sequence[int]]
) -> None:
    """One profile: each dynamic axis in its range, each tensor that is a shape with 1, 2 and 4."""
    profile = builder.create_optimization_profile()
    for tensor in inputs:
        if tensor.is_shape_tensor:
            count = tensor.shape[0] if len(tensor.shape) else 1
            profile.set_shape_input(tensor.name, *([end] * count for end in RANGE))
        elif -1 in tuple(tensor.shape):
            axes = [
                [dim] * 3 if dim != -1 else ranges.get(tensor.get_dimension_name(i), RANGE)
                for i, dim in enumerate(tensor.shape)
            ]
            profile.set_shape(tensor.name, *([axis[end] for axis in axes] for end in range(3)))
    config.add_optimization_profile(profile)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
